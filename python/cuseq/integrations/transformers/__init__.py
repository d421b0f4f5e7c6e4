"""Packed training with Hugging Face transformers: `attn_implementation="cuseq"` and callbacks.

    cuseq.enable(model)                              # a live model: attention, rotation, q/k norm
    model(**cuseq.PackingCollator()(examples)).loss.backward()

A model created with this implementation gets only cuseq's attention:

    cuseq.integrations.transformers.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="cuseq")

Importing this package changes nothing in transformers; `register` and `cuseq.enable` do.
"""

from __future__ import annotations

from cuseq._base.foreign import load

load("transformers", "cuseq's integration with transformers")  # before modules that import it

from cuseq.integrations.transformers._register import register, unregister  # noqa: E402
from cuseq.integrations.transformers.callback import PackingCallback, StopCallback  # noqa: E402

__all__ = ["PackingCallback", "StopCallback", "register", "unregister"]
