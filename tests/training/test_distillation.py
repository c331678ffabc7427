"""Distillation: the loss against timm's tasks and by hand, and runs with teachers of each kind."""

import difflib
import json
import math

import pytest
import timm
import torch
from expecting import error
from timm.task import LogitDistillationTask, TokenDistillationTask
from torch import nn
from torch.nn import functional as F

import train
from vitkernels import models
from vitkernels.config.groups import DistillSettings
from vitkernels.data import Data
from vitkernels.training.distillation import Distillation, Teacher, build_teacher
from vitkernels.training.loss import build_loss

SMALL = ["runtime=cpu", "+model.kwargs.embed_dim=32", "+model.kwargs.num_heads=2", "+model.kwargs.depth=1"]
SHORT = ["trainer.max_steps=3", "trainer.log_every=1", "trainer.warmup_steps=0", "data.batch_size=16"]


class Answers(nn.Module):
    """A model with fixed outputs, in the form that timm's tasks expect."""

    num_classes, in_chans, pretrained_cfg = 4, 3, {"mean": (0.5,) * 3, "std": (0.5,) * 3}

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, images):
        return self.outputs

    def set_distilled_training(self, enable):
        pass


def objective(kind, weight, temperature=3.0):
    return Distillation(lambda images: images, build_loss(), kind, weight, temperature)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_two_heads__match_timm(kind):
    first, second, teacher_logits = torch.randn(3, 5, 4)
    targets = torch.tensor([0, 1, 2, 3, 3])
    task = TokenDistillationTask(
        Answers((first, second)), Answers(teacher_logits), nn.CrossEntropyLoss(), distill_type=kind,
        task_loss_weight=0.7, temperature=3.0, verbose=False,
    )  # fmt: skip
    expected = task(torch.zeros(5, 3, 2, 2), targets)["loss"]
    torch.testing.assert_close(objective(kind, 0.3)((first, second), targets, teacher_logits), expected)


def test_one_head__matches_timm():
    logits, teacher_logits = torch.randn(2, 5, 4)
    targets = torch.tensor([0, 1, 2, 3, 3])
    task = LogitDistillationTask(
        Answers(logits),
        Answers(teacher_logits),
        nn.CrossEntropyLoss(),
        task_loss_weight=0.9,
        temperature=2.0,
        verbose=False,
    )
    expected = task(torch.zeros(5, 3, 2, 2), targets)["loss"]
    torch.testing.assert_close(objective("soft", 0.1, 2.0)(logits, targets, teacher_logits), expected)


def test_loss__matches_hand_computed_values():
    # The student is indifferent between two classes; the teacher gives the first one 0.8 at temperature 1.
    logits, teacher_logits, targets = torch.zeros(1, 2), torch.tensor([[math.log(4), 0.0]]), torch.tensor([1])
    hard = objective("hard", 0.5)(logits, targets, teacher_logits)
    assert float(hard) == pytest.approx(math.log(2))
    divergence = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
    soft = objective("soft", 0.25, temperature=1.0)(logits, targets, teacher_logits)
    assert float(soft) == pytest.approx(0.75 * math.log(2) + 0.25 * divergence)
    # At temperature 2 the teacher's odds are 2 to 1, and the factor is 4.
    divergence = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    soft = objective("soft", 1.0, temperature=2.0)(logits, targets, teacher_logits)
    assert float(soft) == pytest.approx(4 * divergence)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_rows_without_a_sample__contribute_nothing(kind):
    logits, teacher_logits = torch.randn(2, 4, 3)
    targets = torch.tensor([2, -100, 0, -100])
    expected = objective(kind, 0.5)(logits[[0, 2]], targets[[0, 2]], teacher_logits[[0, 2]])
    torch.testing.assert_close(objective(kind, 0.5)(logits, targets, teacher_logits), expected)
    assert objective(kind, 0.5)(logits, torch.full((4,), -100), teacher_logits) == 0
    mixed = F.one_hot(torch.tensor([2, 1, 0, 1]), 3) * torch.tensor([[1.0], [0], [1], [0]])
    torch.testing.assert_close(objective(kind, 0.5)(logits, mixed, teacher_logits), expected / 2)


def test_teacher__gets_images_in_its_own_normalization():
    student, own = ([0.5] * 3, [0.5] * 3), ([0.4, 0.3, 0.2], [0.1, 0.2, 0.4])
    pixels = torch.rand(2, 3, 4, 4)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in own)
    teacher = Teacher(nn.Identity(), student, own)
    torch.testing.assert_close(teacher((pixels - 0.5) / 0.5), (pixels - mean) / std)


def test_teacher__is_frozen_and_in_evaluation_mode(tmp_path):
    resnet = timm.create_model("resnet10t", num_classes=10, in_chans=1)
    torch.save(resnet.state_dict(), tmp_path / "resnet.pt")
    settings = DistillSettings(teacher="resnet10t", checkpoint=str(tmp_path / "resnet.pt"))
    teacher = build_teacher(settings, Data(None, None, 10), 64, 1)
    images = torch.randn(2, 1, 64, 64, requires_grad=True)
    logits = teacher(images)
    torch.testing.assert_close(logits, resnet.eval()(images).detach())
    assert not logits.requires_grad and not teacher.train().model.training


def test_unknown_teacher__suggests_names_of_timm():
    near = difflib.get_close_matches("resnet5O", timm.list_models(), n=8, cutoff=0.4)
    with error("unknown_name", name="resnet5O", choices=sorted(near)):
        build_teacher(DistillSettings(teacher="resnet5O", checkpoint="x.pt"), Data(None, None, 10), 64, 3)


def test_run_with_a_run_as_teacher__learns_from_it(settings, tmp_path, losses):
    train.run(settings(*SMALL, *SHORT), tmp_path / "teacher")
    teacher = f"distill.teacher={tmp_path / 'teacher'}"
    train.run(settings(*SMALL, *SHORT, teacher, "distill.kind=soft"), tmp_path / "student")
    plain, distilled = losses(tmp_path / "teacher"), losses(tmp_path / "student")
    assert sorted(distilled) == [1, 2, 3]
    # In the first step the student has the teacher's first weights, and the teacher has hardly moved away from them.
    assert distilled[1] == pytest.approx(plain[1] / 2, rel=0.1)
    with error("run.settings_differ"):
        train.run(settings(*SMALL, *SHORT, "resume=auto"), tmp_path / "student")
    with error("distill.classes", outputs=10, num_classes=7):
        build_teacher(DistillSettings(teacher=str(tmp_path / "teacher")), Data(None, None, 7), 16, 1)
    with error("distill.images", image_size=32):
        build_teacher(DistillSettings(teacher=str(tmp_path / "teacher/export")), Data(None, None, 10), 32, 1)


@pytest.mark.slow
def test_deit_token__learns_from_a_convolutional_teacher(settings, tmp_path, losses):
    torch.save(timm.create_model("resnet10t", num_classes=1024).state_dict(), tmp_path / "resnet.pt")
    words = ["runtime=cpu", "model=timm", "model.name=deit_tiny_distilled_patch16_224", "model.img_size=64"]
    words += ["+model.kwargs.depth=1", "data=fake", "data.val_items=16", *SHORT, "ema.decay=0.9", "ops=fused"]
    words += ["distill.teacher=resnet10t", f"distill.checkpoint={tmp_path / 'resnet.pt'}"]
    train.run(settings(*words), tmp_path / "run")
    assert all(math.isfinite(loss) for loss in losses(tmp_path / "run").values())
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["parameters_without_gradient"] == 0  # the second head learns, too
    exported = timm.create_model(f"local-dir:{tmp_path / 'run/export'}", pretrained=True).eval()
    assert exported(torch.zeros(1, 3, 64, 64)).shape == (1, 1024)


def test_answer_with_both_heads__only_in_training():
    model = models.create_model("deit_tiny_distilled_patch16_224", "sdpa", img_size=32, depth=1, num_classes=5)
    models.answer_with_both_heads(model)
    first, second = model.train()(torch.zeros(2, 3, 32, 32))
    assert first.shape == second.shape == (2, 5)
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 5)
