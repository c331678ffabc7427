"""Use what a run trained: open its weights as a plain timm model, export, predict and embed."""

from vitkernels.inference.trained_model import WHICH, TrainedModel, open_trained

__all__ = ["WHICH", "TrainedModel", "open_trained"]
