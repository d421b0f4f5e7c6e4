"""Packed and padding-free SFT with TRL, entered through `cuseq.enable(trainer)`.

    trainer = SFTTrainer(model, SFTConfig(packing=True, ...), train_dataset=...)
    cuseq.enable(trainer)
    trainer.train()

TRL's collator marks the documents of a row only by positions that restart. This module makes a
`cuseq.PackedLayout` from the lengths that TRL's packer stores with each row, while they are still
Python ints. Every layer gets that one object, so no layer searches tensors for documents. The loss
stays TRL's own.
"""

from cuseq._base.foreign import load

load("trl", "cuseq's integration with TRL")  # before the modules that import it

from cuseq.integrations.trl._rows import PackedCollator, PackedRows

__all__ = ["PackedCollator", "PackedRows"]
