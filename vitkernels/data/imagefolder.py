"""Class folders of JPEG or PNG images: root/train/<class>/<image>, root/val/<class>/<image>."""

import logging

from vitkernels.data.checks import check_number
from vitkernels.data.contract import Data
from vitkernels.data.folder import Folder, scan_splits, split_by_name
from vitkernels.data.images import ImageSettings
from vitkernels.data.input_spec import InputSpec, data_set

log = logging.getLogger(__name__)


@data_set
def build(spec: InputSpec, images: ImageSettings, *, root: str | None = None, val_share: float | None = None) -> Data:
    """Return images float32 (B, 3, image_size, image_size); classes are the folders' names in sorted order.

    With spec.train=False, train/ need not exist. conf/data/imagefolder.yaml explains the arguments. Raises UsageError,
    before any image is decoded, for an unusable folder or invalid values.
    """
    if val_share is not None:
        check_number("val_share", val_share, 0.001, 0.999)

    def open_folders() -> tuple[dict[str, Folder], int, list[str]]:
        splits = ["train", "val"] if spec.train else ["val"]
        folders = scan_splits(root, splits) if val_share is None else split_by_name(root, splits, val_share)
        classes = folders["val"].classes
        return folders, len(classes), classes

    return images.build(spec, open_folders, log)
