"""The attention layers of a transformers model, and checks that cuseq can replace them."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def find_pretrained(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model that `model` is or contains.

    Raises:
        TypeError: `model` does not contain a transformers model.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(f"model must be or hold a transformers model, got {type(model).__name__}")


def code_of(layer: nn.Module) -> types.ModuleType:
    """Return the modeling module that defines the class of a layer or a model."""
    return sys.modules[type(layer).__module__]


def calls_of(layer: nn.Module) -> tuple[str, ...]:
    """Return the global names and attributes that the forward of a layer's class uses."""
    return inspect.unwrap(type(layer).forward).__code__.co_names


def keywords_of(cls: type) -> set[str]:
    """Return the strings in the forward of a class, the names of keywords it passes among them."""
    code = getattr(inspect.unwrap(getattr(cls, "forward", None) or object), "__code__", None)
    constants = code.co_consts if code is not None else ()
    groups = (const if isinstance(const, tuple) else (const,) for const in constants)
    return {const for group in groups for const in group if isinstance(const, str)}


def hands_keywords_on(forward: types.FunctionType) -> bool:
    """Return whether a forward calls anything with `**keywords`."""
    return any(one.opname == "CALL_FUNCTION_EX" for one in dis.get_instructions(forward))


@functools.cache
def loss_takes_keywords(cls: type) -> bool:
    """Return whether the forward of a model's class hands its keywords on to its loss.

    Models of images say `accepts_loss_kwargs = False` also where it does.
    """
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    instructions = iter(dis.get_instructions(forward))
    for one in instructions:
        if one.argval == "loss_function":
            calls = (later.opname for later in instructions if later.opname.startswith("CALL"))
            return next(calls, None) == "CALL_FUNCTION_EX"
    return True  # it calls no loss, or another model's


def attention_layers(base: PreTrainedModel, mixers: Collection[nn.Module]) -> list[nn.Module]:
    """Return the attention layers of a model's text part.

    Layers of vision encoders are not returned, because they have no `layer_idx`.

    Args:
        base: the model.
        mixers: its recurrent layers. In a model that has some, attention may do without a rotation
            (NoPE), because the recurrent layers know the order of tokens.
    """
    layers = [
        module
        for module in base.modules()
        if hasattr(module, "layer_idx") and module not in mixers and attends(module)
    ]
    if not mixers:
        rotating = [layer for layer in layers if rotates(layer)]
        layers = rotating or (layers if embeds_positions(base, layers) else [])
    return layers


def embeds_positions(base: PreTrainedModel, layers: list[nn.Module]) -> bool:
    """Return whether a model adds positions to its input, so that its layers rotate nothing.

    Attention to an encoder's states (`is_cross_attention`, or not causal) has other lengths.
    """
    takes_positions = "position_ids" in inspect.signature(type(base).forward).parameters
    rotates_inside = any(is_rotary_embedding(module) for module in base.modules())
    return (
        takes_positions
        and not rotates_inside
        and all(
            getattr(layer, "is_causal", False) and not getattr(layer, "is_cross_attention", False)
            for layer in layers
        )
    )


def models_around(base: PreTrainedModel, layers: list[nn.Module]) -> list[PreTrainedModel]:
    """Return the model and those inside it that hold all of some layers: each may be called alone.

    None hold no layers.
    """
    inside = set(layers)
    models = [one for one in base.modules() if isinstance(one, PreTrainedModel)]
    return [model for model in models if inside and inside <= set(model.modules())]


def rotates(layer: nn.Module) -> bool:
    """Return whether an attention layer can take a rotation for its queries and keys."""
    given = inspect.signature(type(layer).forward).parameters
    return "position_embeddings" in given and attends(layer)


def rotating_layers(base: PreTrainedModel, layers: list[nn.Module]) -> list[nn.Module]:
    """Return the attention layers whose queries and keys are rotated.

    A layer may do without (Granite 4 with `position_embedding_type="nope"`): then the model has no
    rotary embedding, and the layer's position_embeddings default to None.
    """
    tables = {type(m).__module__ for m in base.modules() if is_rotary_embedding(m)}

    def is_optional(layer: nn.Module) -> bool:
        given = inspect.signature(type(layer).forward).parameters["position_embeddings"]
        return given.default is None and type(layer).__module__ not in tables

    return [layer for layer in layers if rotates(layer) and not is_optional(layer)]


def is_rotary_embedding(module: nn.Module) -> bool:
    """Return whether a module makes tables of cosines and sines for text tokens."""
    return makes_angles(type(module))


def makes_angles(kind: type) -> bool:
    """Return whether modules of a class make tables of cosines and sines for text tokens."""
    return kind.__name__.endswith("RotaryEmbedding") and "Vision" not in kind.__name__


def attends(layer: nn.Module) -> bool:
    """Return whether a layer calls the attention of its config."""
    return "ALL_ATTENTION_FUNCTIONS" in calls_of(layer) and hasattr(layer, "config")


def refuse_inexact_layers(layers: list[nn.Module]) -> None:
    """Raise ValueError if a layer uses an attention feature that packed attention lacks."""
    for layer in layers:
        name = f"{type(layer).__name__} {layer.layer_idx}"
        if hasattr(layer, "prepare_dynamic_mask"):
            raise ValueError(
                f"{name} computes a mask of its own from its values, which packed attention cannot"
            )
        if getattr(layer, "compressor", None) is not None:
            raise ValueError(
                f"{name} attends to blocks of keys that it compresses along the row, which packed "
                "attention cannot"
            )
        if "position_bias" in inspect.unwrap(type(layer).forward).__code__.co_varnames:
            raise ValueError(
                f"{name} adds biases of its own to the scores, which packed attention cannot"
            )


def dropout_warnings(rates: dict[str, tuple[str, float]]) -> tuple[str, ...]:
    """Return a warning for each class of layers that drops attention weights while it trains.

    Args:
        rates: `dropout_of` a layer by the name of its class.
    """
    return tuple(
        f"DROPOUT: {name} drops attention weights ({option}={rate}), which packed attention "
        f"cannot: packed rows raise ValueError in training mode; set the config's {option} to 0"
        for name, (option, rate) in sorted(rates.items())
        if rate
    )


def dropout_of(layer: nn.Module) -> tuple[str, float]:
    """Return the config's option of dropped attention weights, and a layer's rate."""
    rate = getattr(layer, "attention_dropout", None)
    option = dropout_option(layer)
    if rate is None:
        rate = getattr(layer.config, option, None)
    return option, rate if isinstance(rate, float) else 0.0


def dropout_option(layer: nn.Module) -> str:
    """Return the name of the config's option of dropped attention weights."""
    config = getattr(layer, "config", None)
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    if config is None and hasattr(layer, "attn_dropout"):  # CodeGen's layers keep no config
        return "attn_pdrop"
    return next((name for name in names if hasattr(config, name)), names[0])


def class_names(classes: Iterable[type]) -> tuple[str, ...]:
    """Return the sorted names of the classes without duplicates."""
    return tuple(sorted({one.__name__ for one in classes}))


def rows_of_layer(
    layer: nn.Module, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of the shapes that an attention layer makes, without values.

    Raises:
        Exception: of any kind, for a layer whose sizes have other names.
    """
    names = ("qk_head_dim", "head_dim", "head_size")
    head_dim = next(size for name in names if (size := getattr(layer, name, None)))
    value_dim = getattr(layer, "v_head_dim", head_dim)
    if (keys := getattr(layer, "k_proj", None)) is not None:
        kv_heads = keys.out_features // head_dim
    else:
        kv_heads = getattr(layer, "num_heads", None) or layer.config.num_attention_heads
    heads = kv_heads * getattr(layer, "num_key_value_groups", 1)
    one = torch.empty(1, 1, max(head_dim, value_dim), dtype=dtype, device=device)
    q = one[..., :head_dim].expand(tokens, heads, head_dim)
    return q, q[:, :kv_heads], one[..., :value_dim].expand(tokens, kv_heads, value_dim)


def softcap_of(layer: nn.Module) -> float | None:
    """Return the bound of an attention layer's scores, or None."""
    return getattr(layer, "attn_logit_softcapping", None) or None
