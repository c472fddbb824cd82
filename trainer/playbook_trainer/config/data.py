"""The section `data` of the configuration: where samples come from, and how they become rows."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from playbook.yaml_files import Strict


class GeneratedConfig(Strict):
    """Made-up data with natural statistics (`data.source: generated`); sample i is a function of `seed` and i alone."""

    seed: int = Field(default=0, ge=0)
    num_samples: int = Field(default=1_000_000, gt=0, le=2**40)
    """Documents, or image-question-answer samples, of one epoch."""
    mean_tokens: float = Field(default=427, gt=0, le=2**24)
    """Mean length of a text document; lengths are log-normal."""
    sigma: float = Field(default=1.1, ge=0, le=5)
    """Standard deviation of the logarithm of a document's length."""
    pool_images: int = Field(default=256, gt=0, le=1_000_000)
    """Distinct JPEG files; each is made once, on first use, and kept in `data.path` (or a cache folder of the user)."""
    images_per_sample: list[float] = Field(default_factory=lambda: [1.0], max_length=1000)
    """Weights of one, two, three ... images per sample; VQAv2 has one."""


class DataConfig(Strict):
    """The training data and how it is packed into rows."""

    kind: Literal["text", "vqa", "chat", "mock"] = "text"
    """text: packed text. vqa: images with questions and answers. chat: conversations, with images or without, by the tokenizer's chat template. mock: random tokens, no image; only to measure how far it misleads."""
    path: str | None = None
    """A file, a folder, or the name of a Hugging Face data set; None takes the bundled data."""
    source: Literal["auto", "files", "parquet", "vqav2", "webdataset", "huggingface", "generated"] = "auto"
    """The layout of `path`; auto looks at what is there. files: .txt and .jsonl, or a folder with samples.jsonl."""
    subset: str | None = None
    """Which part: the COCO subset of VQAv2 (train2014), or the configuration of a Hugging Face data set."""
    text_key: str = "text"
    """The column or key that holds a document's text."""
    generated: GeneratedConfig = Field(default_factory=GeneratedConfig)
    tokenizer: str = "byte"
    """`byte`, or the path of a tokenizer.json."""
    seq_len: int = Field(default=256, gt=0, le=2**24)
    pack: bool = True
    """Fill each row with several samples (block-diagonal attention); without it a row holds one sample, padded to seq_len where pad is set."""
    pack_buffer: int = Field(default=32, gt=0, le=2**16)
    """Samples among which first-fit packing chooses."""
    pad: bool = True
    """Pad every row to seq_len, so that shapes stay static."""
    pad_to_multiple: int | None = Field(default=None, gt=0)
    """With `pad: false`, pad every row to a multiple of this many tokens."""
    num_workers: int = Field(default=0, ge=0, le=1024)
    """Processes of each rank that read data; 0 reads in the rank itself."""
    images: Literal["variable", "fixed"] = "variable"
    """Image sizes as they come, or every image resized to one size (fixed_image_size)."""
    fixed_image_size: list[int] = Field(default_factory=lambda: [128, 128])
    """Height and width in pixels, used with `images: fixed`."""
    max_image_pixels: int = Field(default=65_536, gt=0, le=2**28)
    """Larger images are scaled down to at most this many pixels, aspect ratio kept."""
    min_image_pixels: int | None = Field(default=None, ge=0, le=2**28)
    """Smaller images are scaled up to at least this many pixels, as Qwen3-VL's preprocessor does, or to max_image_pixels where that is less. None takes
    what the image processor beside init.weights says, and scales nothing up where there is none."""
    max_source_pixels: int = Field(default=64_000_000, gt=0, le=2**31)
    """A file that claims more pixels is bad: a few kilobytes can unfold into gigabytes."""
    max_images_per_sample: int = Field(default=3, gt=0, le=2**16)
    """A sample with more is too long."""
    on_long_sample: Literal["drop", "cut"] = "drop"
    """An image-question-answer sample that is longer than a row, with its images scaled down as far as they may be. drop: it is left out, and counted.
    cut: its last images are left out, then its answer is cut at the end. A question is never cut: where it leaves no room, the sample is dropped."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """A row of the data that cannot be read as a sample. fail: stop with its file and line. skip: it is left out, named and counted."""
    on_bad_image: Literal["fail", "skip"] = "fail"
    """fail: stop with the file's name. skip: the image becomes grey, its sample bears no loss and keeps its place, and both are counted."""
    cache: Literal["none", "memory"] = "none"
    """memory: each worker keeps decoded and resized images, so that each is decoded once."""
    cache_gib: float = Field(default=1.0, gt=0)
    """What the cache of one worker may hold; images beyond it are decoded anew."""
