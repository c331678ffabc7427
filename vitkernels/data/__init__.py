'''Input pipelines: each data set is a function that returns a Data, named by `_target_` in the configuration.

Training calls the function with keyword arguments: InputSpec's fields, and the other settings of `data`. A data set is
one file, in this package or in any module that Python can import:

    from vitkernels.data import Data, InputSpec, data_set
    import torch

    class Stripes:  # a vitkernels.data.Samples: random access to the images of one split
        """Class 0 has horizontal stripes, class 1 vertical ones."""

        def __init__(self, count, spec):
            self.count, self.shape = count, (spec.in_chans, spec.image_size, spec.image_size)

        def __len__(self):
            return self.count

        def load(self, ids, epoch):
            targets = torch.tensor(ids) % 2
            waves = torch.arange(self.shape[-1]).sin().expand(len(ids), *self.shape)
            images = torch.where(targets.view(-1, 1, 1, 1) == 1, waves, waves.mT)
            return images.contiguous(), targets, []  # no problems

        def describe(self, ids):
            return [f"stripes[{i}]" for i in ids]

    @data_set
    def build(spec: InputSpec, *, items: int = 1000) -> Data:
        train = spec.loader(Stripes(items, spec), training=True) if spec.train else None
        return Data(train, spec.loader(Stripes(100, spec), training=False), num_classes=2)

Saved as stripes.py next to train.py or on PYTHONPATH, it trains with a configuration file my_conf/data/stripes.yaml

    _target_: stripes.build
    batch_size: 32
    num_workers: 0
    items: 1000

by `python train.py --config-dir=my_conf data=stripes`. Samples get shuffling, sharding over processes, workers, exact
resume, masks for unreadable images and (spec.mixing) Mixup and CutMix from DatasetLoader.

A data set that streams has no random access, so it implements Loader itself. Training uses only these members:

    import itertools
    from vitkernels.data import Data, InputSpec, data_set
    import torch

    class StreamLoader:  # a vitkernels.data.Loader
        """Batches read in turn from an iterator of (image, class) pairs."""

        def __init__(self, open_stream, num_samples, spec):
            self.batch_size = spec.batch_size  # rows per process; every batch has exactly as many
            self.num_samples = num_samples
            self.batches_per_epoch = num_samples // (spec.batch_size * spec.shard.world)  # equal on all processes
            self.bad_images = {}
            self._open_stream = open_stream

        def epoch(self, epoch, start=0):
            stream = self._open_stream(epoch)
            batches = iter(lambda: list(itertools.islice(stream, self.batch_size)), [])
            for batch in itertools.islice(batches, start, self.batches_per_epoch):
                images, targets = zip(*batch)
                yield torch.stack(images), torch.tensor(targets)

        def sample_ids(self, epoch, batch, rank=None):
            return []  # used only to name the samples of a non-finite loss

        def describe(self, ids):
            return []

    @data_set
    def build(spec: InputSpec, *, items: int = 1000) -> Data:
        def noise(epoch):  # in practice a reader of the files that belong to spec.shard.rank of spec.shard.world
            draw = torch.Generator().manual_seed(hash((spec.seed, epoch, spec.shard.rank)))
            while True:
                yield torch.randn(spec.in_chans, spec.image_size, spec.image_size, generator=draw), 0

        train = StreamLoader(noise, items, spec) if spec.train else None
        return Data(train, StreamLoader(noise, spec.batch_size * spec.shard.world, spec), num_classes=2)

Resume calls epoch(epoch, start) with the number of batches already trained on. It is exact if the loader then returns
the batches that an uninterrupted epoch would have; this one rereads the stream up to there. A validation loader must
count every image once, and fill its last batch with pad_batch.
'''

from vitkernels.data.contract import IGNORE, UNSHARDED, Batch, Data, Loader, Shard, pad_batch
from vitkernels.data.image_source import SourceError
from vitkernels.data.input_spec import InputSpec, data_set
from vitkernels.data.loader import BadImagesError, DatasetLoader, WorkerDiedError
from vitkernels.data.samples import SampleProblem, Samples

__all__ = [
    "IGNORE",
    "UNSHARDED",
    "BadImagesError",
    "Batch",
    "Data",
    "DatasetLoader",
    "InputSpec",
    "Loader",
    "SampleProblem",
    "Samples",
    "Shard",
    "SourceError",
    "WorkerDiedError",
    "data_set",
    "pad_batch",
]
