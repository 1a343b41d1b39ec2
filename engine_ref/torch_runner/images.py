"""Images of a vision-language model: named by their content, computed once, merged in place of their placeholders."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvhash.extra_keys import MultimodalItem

from .errors import UnsupportedInputError
from .loading import LoadedModel

__all__ = ["Image", "Images"]


@dataclass(frozen=True, slots=True)
class Image:
    """An image that the model has seen. ``identifier``: digest of its pixels; ``length``: tokens that it fills."""

    identifier: str
    length: int


class Images:
    """The features of images, (length, hidden size) each, kept until they are dropped."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._features: dict[str, torch.Tensor] = {}

    def add(self, pixels: torch.Tensor) -> Image:
        """Compute an image, (channels, height, width) as the model's processor gives it, unless it is known.

        Raises UnsupportedInputError for a model without images, or pixels that it does not take.
        """
        self._check_supported("$.pixels")
        pixels = pixels.detach().to("cpu", torch.float32).contiguous()
        digest = hashlib.sha256(repr(tuple(pixels.shape)).encode() + pixels.numpy().tobytes()).hexdigest()
        if digest not in self._features:
            model, where = self._loaded.model, self._loaded.device
            try:
                with torch.inference_mode():
                    seen = model.get_image_features(
                        pixel_values=pixels[None].to(where, self._loaded.dtype), return_dict=True
                    )
            except (RuntimeError, ValueError) as error:
                raise UnsupportedInputError(
                    f"the model does not take pixels of shape {tuple(pixels.shape)}: {error}", at="$.pixels"
                ) from None
            self._features[digest] = seen.pooler_output[0]
        return Image(digest, len(self._features[digest]))

    def drop(self, image: Image) -> None:
        """Forget an image; requests with it must have ended."""
        self._features.pop(image.identifier, None)

    def expand(
        self, prompt: Sequence[int], images: Sequence[Image]
    ) -> tuple[list[int], list[MultimodalItem]]:
        """Return a prompt in which each placeholder is as many as its image fills, and where the images are.

        Raises UnsupportedInputError unless there is one placeholder for each image.
        """
        self._check_supported("$.prompt")
        placeholder = self._loaded.image_token_id
        found = sum(token == placeholder for token in prompt)
        if found != len(images):
            raise UnsupportedInputError(
                f"the prompt has {found} placeholders ({placeholder}) for {len(images)} images", at="$.prompt"
            )
        tokens, items, left = list[int](), list[MultimodalItem](), iter(images)
        for token in prompt:
            if token != placeholder:
                tokens.append(token)
                continue
            image = next(left)
            items.append(MultimodalItem(image.identifier, len(tokens), image.length))
            tokens += [token] * image.length
        return tokens, items

    def check(self, items: Sequence[MultimodalItem]) -> None:
        """Raise UnsupportedInputError for an image that is not there or fills another number of tokens."""
        for index, item in enumerate(items):
            self._check_supported("$.multimodal")
            features = self._features.get(item.identifier)
            if features is None:
                raise UnsupportedInputError(
                    f"the engine has no image {item.identifier!r}; add it first",
                    at=f"$.multimodal[{index}].identifier",
                )
            if len(features) != item.length:
                raise UnsupportedInputError(
                    f"the image fills {len(features)} tokens, not {item.length}",
                    at=f"$.multimodal[{index}].length",
                )

    def rows(self, items: Sequence[MultimodalItem], start: int, end: int) -> list[tuple[int, torch.Tensor]]:
        """Return what stands for the tokens `start` to `end`: first token and features of each image among them."""
        found = []
        for item in items:
            first, last = max(start, item.offset), min(end, item.end)
            if first < last:
                features = self._features[item.identifier]
                found.append((first, features[first - item.offset : last - item.offset]))
        return found

    def _check_supported(self, at: str) -> None:
        if self._loaded.image_token_id is None:
            raise UnsupportedInputError(
                "the model takes no images; their tokens would be computed as text", at=at
            )
