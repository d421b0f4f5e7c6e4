"""The configs of an enabled model, and its share in the functions that cuseq replaces.

Models that are made from one config object share it. So an enabled model gets a copy of each config
that names its attention, and `disable` puts the originals back.

Each enabled layer has the `Hold` of its model, so that whatever is left of a model (a backbone, one
layer) keeps what it needs; a deep copy holds it too.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from cuseq._base.models import mark_separated, text_config, unmark_separated
from cuseq.integrations.transformers._functions import (
    Place,
    hold_function,
    restore_function,
)
from cuseq.integrations.transformers._layers import models_around
from cuseq.integrations.transformers._private import ATTENTION, set_attention_alone
from cuseq.integrations.transformers._register import (
    check_model,
    hold_registration,
    release_registration,
)
from cuseq.integrations.transformers.names import NAME, TOWER


class Hold:
    """A share in the registration, in replaced functions and in the mark of a config.

    It is released by `release`, or when nothing has it any more.

    Attributes:
        functions: the replaced functions.
        separating: those of them that keep the documents of recurrent layers apart.
        separated: the config of recurrent layers that keep documents apart, or None.
        has_forwards: whether documents are kept apart by forwards that a pickle does not have.
        lacks_forwards: whether it comes from the pickle of such a model.
    """

    def __init__(
        self,
        functions: Iterable[Place],
        separating: Iterable[Place],
        separated: Any,
        has_forwards: bool,
        lacks_forwards: bool = False,
    ) -> None:
        """Take over one hold of the registration and of each function."""
        self.functions = list(functions)
        self.separating = list(separating)
        self.separated = separated
        self.has_forwards = has_forwards
        self.lacks_forwards = lacks_forwards
        marked = None
        if separated is not None:
            mark_separated(separated)
            marked = id(separated)  # of nothing else, as long as this holds the config
        self._release = weakref.finalize(self, _release, self.functions, marked)
        self._release.atexit = False

    def release(self) -> None:
        """Give back the share; a second call does nothing."""
        self._release()

    def __deepcopy__(self, memo: dict[int, Any]) -> Hold:
        hold_registration()
        for place in self.functions:
            hold_function(*place)
        config = copy.deepcopy(self.separated, memo)
        lacks_forwards = self.lacks_forwards
        return Hold(self.functions, self.separating, config, self.has_forwards, lacks_forwards)

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (self.has_forwards,)


def _loaded(had_forwards: bool) -> Hold:
    hold_registration()
    return Hold([], [], None, had_forwards, lacks_forwards=had_forwards)


def _release(functions: list[Place], marked: int | None) -> None:
    for place in functions:
        restore_function(*place)
    if marked is not None:
        unmark_separated(marked)
    release_registration()


@dataclass
class Own:
    """A config of an enabled model.

    Attributes:
        original: the config in whose place it is.
        own: the copy.
        before: the attributes that both had.
        attention: the attention of layers that it names; None if it names none.
    """

    original: Any
    own: Any
    before: dict[str, Any]
    attention: str | None


def give_configs(
    root: nn.Module, base: PreTrainedModel, layers: list[nn.Module], of_towers: list[nn.Module]
) -> list[Own]:
    """Give a model configs of its own that name cuseq's attention.

    Args:
        root: the module that was given to `enable`, which may hold configs of the model too.
        base: the model.
        layers: its attention layers. Their configs may be copies (peft's `modules_to_save`, copied
            layers).
        of_towers: the attention layers of its towers.

    Raises:
        ValueError: a class of models cannot use cuseq's attention.
    """
    attending = {id(layer.config): layer.config for layer in layers}
    if layers:
        attending[id(text_config(base))] = text_config(base)
    attentions = dict.fromkeys(attending, NAME)
    around = models_around(base, layers)
    for model in around:
        if id(model.config) in attending:
            check_model(model)
    attending |= {id(layer.config): layer.config for layer in of_towers}
    attentions |= {id(layer.config): TOWER for layer in of_towers}
    originals = attending | {id(model.config): model.config for model in around}
    made = {
        key: Own(one, copy.copy(one), dict(vars(one)), attentions.get(key))
        for key, one in originals.items()
    }
    for each in made.values():
        if each.attention is not None:
            set_attention_alone(each.own, each.attention)
        for name, value in vars(each.own).items():
            if id(value) in made:
                vars(each.own)[name] = made[id(value)].own
    _exchange(root, {key: each.own for key, each in made.items()})
    return list(made.values())


def attend(configs: list[Own]) -> None:
    """Name cuseq's attention in a model's configs again, in which the user may have changed it."""
    for each in configs:
        if each.attention is not None:
            set_attention_alone(each.own, each.attention)


def take_configs(root: nn.Module, configs: list[Own]) -> None:
    """Undo `give_configs`; what was changed in a config since is changed in the original."""
    owned = {id(each.own): each.original for each in configs}
    for each in configs:
        for name, value in vars(each.own).items():
            is_changed = name not in each.before or each.before[name] is not value
            if is_changed and name != ATTENTION and id(value) not in owned:
                vars(each.original)[name] = value
    _exchange(root, owned)


def _exchange(root: nn.Module, configs: dict[int, Any]) -> None:
    for module in root.modules():
        for name, value in vars(module).items():
            if id(value) in configs:
                vars(module)[name] = configs[id(value)]
