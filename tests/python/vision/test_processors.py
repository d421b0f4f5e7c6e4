"""Test `MultimodalPackingCollator` of a processor: the batch is that of the model's config."""

from __future__ import annotations

import importlib.util
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cuseq.data import MultimodalPackingCollator

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
GLM = ["<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"]
# By class: a model type, special tokens, the classes of its parts.
PROCESSORS = {
    "Qwen2VLProcessor": ("qwen2_vl", QWEN, "Qwen2VL", "Qwen2VL"),
    "Qwen3VLProcessor": ("qwen3_vl", QWEN, "Qwen2VL", "Qwen3VL"),
    "Glm4vProcessor": ("glm4v", GLM, "Glm4v", "Glm4v"),
    "Glm46VProcessor": ("glm46v", GLM, "Glm46V", "Glm46V"),
}
HAS_VIDEOS = importlib.util.find_spec("torchvision") is not None  # by which videos are read


def processor_of(name: str) -> Any:
    """Return a processor with a tokenizer of seven words."""
    _, special, images, videos = PROCESSORS[name]
    words = ["a", "b", "c", "<e>", "<p>", *special]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<e>", pad_token="<p>", additional_special_tokens=special
    )
    cls = getattr(transformers, f"{images}ImageProcessorPil", None)
    cls = cls or getattr(transformers, f"{images}ImageProcessor")
    size = dict(shortest_edge=64, longest_edge=4096)
    image_processor = cls(patch_size=4, size=size)
    kind = getattr(transformers, name)
    if HAS_VIDEOS:
        cls = getattr(transformers, f"{videos}VideoProcessor")
        return kind(image_processor, tokenizer, cls(patch_size=4))

    class WithoutVideos(kind):
        def __init__(self):
            self.image_processor, self.tokenizer = image_processor, tokenizer
            self.image_token, self.video_token = special[:2]
            self.image_token_id, self.video_token_id = 5, 6

    return WithoutVideos()


def config_of(name: str) -> Any:
    family = PROCESSORS[name][0]
    config = transformers.AutoConfig.for_model(family, image_token_id=5, video_token_id=6)
    config.vision_config.patch_size = 4
    return config


def document(processor: Any, name: str, shape: tuple[int, int] | None) -> dict[str, Any]:
    """Return a document as a processor makes it."""
    text = "a b c"
    if shape is None:
        return {"input_ids": torch.tensor([processor.tokenizer(text)["input_ids"]])}
    generator = np.random.default_rng(0)
    image = Image.fromarray(generator.integers(0, 255, (*shape, 3), dtype=np.uint8))
    if HAS_VIDEOS:
        return dict(processor(text=[f"{text} {processor.image_token}"], images=[image],
                              return_tensors="pt"))  # fmt: skip
    found = dict(processor.image_processor(images=[image], return_tensors="pt"))
    count = int(found["image_grid_thw"].prod()) // processor.image_processor.merge_size**2
    return found | {"input_ids": torch.tensor([[0, 1, 2, *[5] * count]])}


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_batch_of_a_processor_is_that_of_the_config(name):
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    processor = processor_of(name)
    documents = [document(processor, name, one) for one in ((32, 24), None, (16, 48))]
    options = dict(total_tokens=96, image_capacity=400)
    expected = MultimodalPackingCollator(config_of(name), **options)(documents)
    of_processor = MultimodalPackingCollator(processor, **options)
    for collate in (of_processor, pickle.loads(pickle.dumps(of_processor))):
        batch = collate(documents)
        assert list(batch) == list(expected)
        for key in ("input_ids", "labels", "position_ids", "pixel_values", "image_grid_thw"):
            assert torch.equal(batch[key], expected[key]), key
        for key in ("position_ids", "grid_thw", "tokens"):
            layouts = (getattr(one["image_layout"], key) for one in (batch, expected))
            assert torch.equal(*layouts)
        assert batch["image_layout"].windows is None
    blank = [
        MultimodalPackingCollator(one, blank_image=True)(documents[1:2])
        for one in (processor, config_of(name))
    ]
    assert torch.equal(blank[0]["pixel_values"], blank[1]["pixel_values"])
    assert blank[0]["pixel_values"].shape[1:] == documents[0]["pixel_values"].shape[1:]
    assert torch.equal(blank[0]["image_grid_thw"], blank[1]["image_grid_thw"])


@pytest.mark.parametrize(
    "name, lacks",
    [
        ("Qwen2_5_VLProcessor", "does not say tokens_per_second and window_size"),
        ("Ernie4_5_VLMoeProcessor", "does not say temporal_merge_size"),
        ("PaddleOCRVLProcessor", "is not known"),
        ("LlavaProcessor", "is not known"),
    ],
)
def test_a_processor_that_does_not_say_enough_is_refused(name, lacks):
    class Own(getattr(transformers, name)):
        def __init__(self):
            self.image_processor = SimpleNamespace(merge_size=2, patch_size=4)

    with pytest.raises(ValueError, match=f"config for a {name}, which {lacks}: pass model.config"):
        MultimodalPackingCollator(Own())


def test_parts_of_a_processor_must_agree():
    processor = processor_of("Qwen3VLProcessor")
    processor.video_processor = SimpleNamespace(merge_size=4, patch_size=4, temporal_patch_size=2)
    with pytest.raises(ValueError, match="one merge_size, got 2 in its image_processor and 4"):
        MultimodalPackingCollator(processor)
