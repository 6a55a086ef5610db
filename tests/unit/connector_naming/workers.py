"""A rank, as far as its models go."""

from torch import nn


class Worker:
    """With a model and perhaps a drafter."""

    def __init__(self, model: nn.Module, draft: nn.Module | None = None) -> None:
        self._model = model
        self._draft = draft

    def get_model(self) -> nn.Module:
        return self._model

    def get_draft_model(self) -> nn.Module | None:
        return self._draft
