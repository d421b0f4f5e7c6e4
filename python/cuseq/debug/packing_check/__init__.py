"""`check_packing`: compare a model on a packed row with the same model on each document alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cuseq._base.arguments import as_float, check_flag, shown
from cuseq.data.collator import PackingCollator
from cuseq.debug.packing_check._batch import read_batch
from cuseq.debug.packing_check._comparison import Comparison
from cuseq.debug.packing_check._documents import config_of, read_documents, tokens_of_inputs
from cuseq.debug.packing_check._report import Check, PackingReport, Suspect
from cuseq.debug.packing_check._runs import Runs

__all__ = ["Check", "PackingReport", "Suspect", "check_packing"]


def check_packing(
    model: nn.Module,
    examples: Sequence[Mapping[str, Any] | Sequence[int] | Tensor] | Mapping[str, Any],
    *,
    collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
    forward: Callable[[nn.Module, list[dict[str, Any]]], Any] | None = None,
    rtol: float | None = None,
    bitwise: bool = False,
) -> PackingReport:
    """Compare a model on a packed row with the same model on each document alone.

    The check compares logits, the loss, and the gradients of the loss in all parameters and in the
    token embeddings.

    Leaks between documents are tested exactly. Changing the first or last token of one document
    must not change a bit of another document's logits, and the gradient of one document's logits in
    another's embeddings must be zero. With more than 8 documents, groups of documents are changed
    together, chosen so that any two documents are told apart. Tokens that all documents begin or
    end with are kept, because a model may use them to find boundaries; the tokens beside them are
    changed instead. If a check fails, the report names the most likely cause.

    The packed run calls the model as a training loop does: `model(**batch)`, with exactly what the
    collator returned, so that a forgotten keyword (such as `use_cache=False`) is found. The single
    runs call `model(input_ids=[1, n], labels=[1, n])`, uncompiled, plus the example's other keys
    that hold one number per token and are also in the packed batch. The model runs in eval mode.

    Examples may have images: further keys that the model's forward takes by name, as its processor
    makes them for one text (`pixel_values`, `image_grid_thw`). Your collator or `forward` packs
    them. The single run of such an example calls the model with all of its keys that the model
    takes by name, without positions, so that the model makes its own (M-RoPE). Tokens that the
    model's config names for images, videos and audio are not changed.

    Examples may be one batch of your own loader instead (`next(iter(loader))`), of text alone. Then
    its documents are those that it says it has, by whatever a call of an enabled model is read by
    (`packed`, offsets, numbers of documents, positions that begin again, ...), and `model(**batch)`
    is compared with these one by one: the report names their lengths. Where a batch says nothing,
    each row is a document, without the padding of its mask. Its labels may be shifted already if
    the model returns no loss.

    Afterwards the function restores its modes, buffers and gradients, the attributes of its modules
    that are numbers, strings or tensors, and torch's random state. It does not restore state that
    the model keeps elsewhere.

    Args:
        model: causal language model, any `torch.nn.Module`. If it returns a loss, that loss must be
            the mean over unshifted labels. If it returns none, the labels of the packed batch must
            be those of the examples, unshifted or shifted.
        examples: documents: mappings with `input_ids` (and optionally `labels`), or the ids alone,
            as lists or int `[n]`. At least two must have two tokens or more. Documents of several
            lengths, one of them a single token, find the most errors. Or one batch: a mapping with
            int `input_ids` `[rows, tokens]`. Without `packed` it is read by the integration with
            transformers.
        collator: makes a batch of examples, default `cuseq.PackingCollator()`. Its `input_ids` must
            hold the documents in order, with padding anywhere.
        forward: `forward(model, examples)` for any other loop. It packs and runs the examples
            (dicts of lists) and returns logits `[total_tokens, vocabulary]` in the order of the
            examples, with padding last, or an object, dict or tuple with the logits and a `loss`.
            For the single runs it is called with one example.
        rtol: largest relative difference of logits (L2, per token), loss and gradients (L2, per
            parameter). The default is the square root of the largest machine epsilon in use,
            including inside the model (half of the digits): 3.5e-4 in fp32, 0.031 in fp16 and with
            TF32, 0.088 in bf16.
        bitwise: also check that each document's logits are the same bits wherever it lies in rows
            of this length, and whoever its neighbours are. A policy that is trained in packed rows
            then has the log-probabilities that it would have in any other. Takes about four forward
            passes more per document.

    Returns:
        A `PackingReport`: `ok`, the numbers by name, the suspect, and a table as `str`.

    Raises:
        ValueError, TypeError: an argument is wrong, or `forward` or the collator returned something
            wrong. Errors that the model raises are passed on.
        ImportError: a batch has no `packed`, and transformers is not installed.

    Synchronises many times. Takes about three forward and backward passes per document.

    Examples:
        >>> class Bigrams(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.table = torch.nn.Embedding(16, 16)
        ...     def forward(self, input_ids, **unused):
        ...         return self.table(input_ids)
        >>> report = cuseq.check_packing(Bigrams(), [[5, 6, 7], [8, 2], [9, 10, 11, 12]])
        >>> report.ok
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {shown(model)}")
    for function, name in ((collator, "collator"), (forward, "forward")):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function or None, got {shown(function)}")
    if collator is not None and forward is not None:
        raise ValueError(
            "collator must be None if forward is given, since forward makes the batches"
        )
    if isinstance(examples, Mapping) and not collator is forward is None:
        raise ValueError("collator and forward must be None if examples are one batch")
    check_flag(bitwise, "bitwise")
    if bitwise and isinstance(examples, Mapping):
        raise ValueError(
            "examples must be documents for bitwise=True, which lays them into other rows, got one "
            "batch"
        )
    if rtol is not None and not as_float(rtol, "rtol") > 0:
        raise ValueError(f"rtol must be above 0, got {rtol}")
    with _untouched(model):
        config = config_of(model)
        own = None
        if isinstance(examples, Mapping):
            own = read_batch(examples, config)
            examples = own.examples()
        documents = read_documents(examples, tokens_of_inputs(config))
        runs = Runs(model, PackingCollator() if collator is None else collator, forward, own)
        images = sorted(set().union(*(document.inputs(runs.names) for document in documents)))
        if images and collator is forward is None:
            raise ValueError(
                f"collator or forward must be given for examples with {', '.join(images)}: "
                "cuseq.PackingCollator packs keys with one value per token alone"
            )
        notes = () if own is None else (own.said(),)
        return Comparison(runs, documents, rtol, notes, bitwise).report()


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Run the body in eval mode with gradients on, then restore the model and the random state.

    Modes, buffers and plain attributes of the modules are restored.
    """
    modes = [(module, module.training) for module in model.modules()]
    kept = [
        _Kept(values) for module in model.modules() for values in (vars(module), module._buffers)
    ]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    # cuDNN's recurrent layers have no backward in eval mode; PyTorch's own do.
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    cudnn = torch.backends.cudnn
    with (
        cudnn.flags(enabled=cudnn.enabled and not recurrent),
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                if module.training != training:
                    # train() may do more than set the flag: LoRA layers merge their weights
                    module.train(training)
            with torch.no_grad():
                for values in kept:
                    values.put_back()
            for module, _ in modes:
                module._non_persistent_buffers_set.intersection_update(module._buffers)


class _Kept:
    """Copy of the plain values of a module's attributes or buffers, including `training`."""

    def __init__(self, values: dict[str, Any]):
        self.values = values
        self.before = self._plain()
        self.copies = {
            name: value.detach().clone()
            for name, value in self.before.items()
            if isinstance(value, Tensor)
        }

    def put_back(self) -> None:
        for name in self._plain().keys() - self.before.keys():
            del self.values[name]
        self.values.update(self.before)
        for name, copy in self.copies.items():
            if not torch.equal(self.before[name], copy):
                self.before[name].copy_(copy)

    def _plain(self) -> dict[str, Any]:
        kinds = (type(None), bool, int, float, str, Tensor)
        return {name: value for name, value in self.values.items() if isinstance(value, kinds)}
