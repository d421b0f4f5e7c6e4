"""`check_packing`: is a packed row the same to a model as its documents one by one?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cuseq._arguments import as_float, shown
from cuseq.data.collator import PackingCollator
from cuseq.debug.packing_check._comparison import Comparison
from cuseq.debug.packing_check._documents import read_documents
from cuseq.debug.packing_check._report import Check, PackingReport, Suspect
from cuseq.debug.packing_check._runs import Runs

__all__ = ["Check", "PackingReport", "Suspect", "check_packing"]


def check_packing(
    model: nn.Module,
    examples: Sequence[Mapping[str, Any] | Sequence[int] | Tensor],
    *,
    collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
    forward: Callable[[nn.Module, list[dict[str, Any]]], Any] | None = None,
    rtol: float | None = None,
) -> PackingReport:
    """Compares a model on a packed row with the same model on each document alone.

    Compared are logits, the loss, the gradients of it in all parameters and in the embeddings of
    the tokens. Leaks are looked for exactly: another first or last token in one document must
    change no bit of another's logits, and another's embeddings must have a gradient of zero; of
    more than 8 documents whole groups are changed as well, so that any two are told apart. Tokens
    that all documents begin or end with stay, as a model may cut there: those beside them are
    changed. Where something is wrong, the report says what most likely is.

    Packed the model is called as training loops do, `model(**batch)`, with what the collator made
    and nothing else, so that a keyword that was forgotten (`use_cache=False`, say) is found;
    alone as `model(input_ids=[1, n], labels=[1, n])`, uncompiled, with those of the example's other
    keys that hold a number for each token and are in the packed batch too. It runs in eval mode.
    Afterwards its modes, buffers and gradients, its modules' attributes that are numbers, strings
    or tensors, and torch's random numbers are what they were; state that a model keeps elsewhere is
    not.

    Args:
        model: causal language model, any `torch.nn.Module`: its loss, if it gives one, is the mean
            over unshifted labels. If it gives none, the labels of the packed batch must be those of
            the examples, unshifted or shifted.
        examples: documents, mappings with `input_ids` (and `labels`) or the ids alone, lists or
            int `[n]`; at least two of them with two tokens or more. Several lengths, and one
            token, show most.
        collator: makes a batch of examples, default `cuseq.PackingCollator()`. Its `input_ids` must
            hold the documents in their order, padding wherever it likes.
        forward: `forward(model, examples)` for any other loop: packs and runs the examples (dicts
            of lists) and returns logits `[total_tokens, vocabulary]`, in the examples' order,
            padding behind them, or an object, dict or tuple with these and a `loss`. One by one it
            is called with one example.
        rtol: largest relative difference of logits (L2, of each token), loss and gradients (L2, of
            each parameter). Default the square root of the widest machine epsilon at work, inside
            of the model too, half of its digits: 3.5e-4 in fp32, 0.031 in fp16 and with TF32, 0.088
            in bf16.

    Returns:
        A `PackingReport`: `ok`, the numbers by name, the suspect, and a table as `str`.

    Raises:
        ValueError, TypeError: what is wrong with an argument, or with what `forward` or the
            collator returned. What the model raises is raised.

    Synchronises all the time; takes about three forwards and backwards for each document.

    Example:
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
        raise ValueError("collator must be left out beside forward, which makes its own batches")
    if rtol is not None and not as_float(rtol, "rtol") > 0:
        raise ValueError(f"rtol must be above 0, got {rtol}")
    with _untouched(model):
        documents = read_documents(examples)
        runs = Runs(model, PackingCollator() if collator is None else collator, forward)
        return Comparison(runs, documents, rtol).report()


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Eval mode and gradients on; afterwards modes, buffers, plain attributes and random numbers as
    before."""
    modes = [(module, module.training) for module in model.modules()]
    kept = [
        _Kept(values) for module in model.modules() for values in (vars(module), module._buffers)
    ]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    # In eval mode cuDNN's recurrent layers have no backward, PyTorch's own do.
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
                    module.train(training)  # which may do more, as LoRA layers that merge
            with torch.no_grad():
                for values in kept:
                    values.put_back()
            for module, _ in modes:
                module._non_persistent_buffers_set.intersection_update(module._buffers)


class _Kept:
    """The plain values of a module's attributes or buffers, `training` among them."""

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
