"""What goes over the wire, as /docs shows it: these models check queries and bodies, and describe answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from service.catalogue import Change, State
from service.manifest import LONGEST_NAME, REACH, Variant
from service.verdict import NOT_A_DIGIT_SHARE, UNSURE_SHARE, Verdict

ModelName = Annotated[str | None, Field(description="which model, of /models; the server's default when absent", max_length=64)]
Delta = Annotated[FiniteFloat, Field(ge=-1, le=1)]
Token = Annotated[str, Field(max_length=12_000)]
MOST_DIMS = 64
MOST_STEPS = 41


class _Query(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelName = None


class PredictQuery(_Query):
    normalise: Literal["auto", "none"] = Field(
        "auto", description="auto makes a picture look like the training set, none takes it as it is"
    )
    reconstruct: bool = Field(True, description="whether each object's drawing is in the answer")
    input: bool = Field(False, description="whether the picture as the network took it, after normalise, is in the answer")


class _Sent(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OnePicture(_Sent):
    FORM: ClassVar = '{"image": "<base64>"}'

    image: str = Field(description="picture's bytes in base64, or a data URI of them", json_schema_extra={"format": "byte"})


class ManyPictures(_Sent):
    FORM: ClassVar = '{"images": ["<base64>", ...]}'

    images: list[Annotated[str, Field(json_schema_extra={"format": "byte"})]] = Field(
        description="list of pictures, each as /predict's `image`"
    )


class Subject(_Query):
    """A pose from /predict, or the prototype of a class."""

    pose: Token | None = Field(None, description="pose token, from an answer of /predict")
    label: str | None = Field(None, max_length=LONGEST_NAME, description="a class: its prototype, the mean of real poses")
    as_label: str | None = Field(None, max_length=LONGEST_NAME, description="with pose: this class instead, in the same hand")

    @model_validator(mode="after")
    def _one_subject(self) -> Self:
        if self.pose is not None and self.label is not None:
            raise ValueError("pose and label exclude each other; to draw a pose as another class use as_label")
        if self.as_label is not None and self.pose is None:
            raise ValueError("as_label needs a pose; for a class's own prototype use label")
        return self


class ReconstructQuery(Subject):
    dim: list[int] = Field([], max_length=MOST_DIMS, description="pose dimension to move; repeatable, each with its delta")
    delta: list[Delta] = Field([], max_length=MOST_DIMS, description="how far, -1 to 1; as many as dims")
    size: int = Field(140, ge=8, le=1024, description="longer side of a PNG's drawings in pixels; JSON has the model's own size")

    @model_validator(mode="after")
    def _a_delta_each(self) -> Self:
        if len(self.dim) != len(self.delta):
            raise ValueError(f"{len(self.dim)} dim and {len(self.delta)} delta; give one delta for each dim")
        return self


class SweepQuery(Subject):
    dim: list[int] = Field([], max_length=MOST_DIMS, description="rows of the sheet; all dimensions when absent")
    low: Delta = Field(-REACH, description="delta of the first column")
    high: Delta = Field(REACH, description="delta of the last column")
    names: bool = Field(
        True, description="a column at the left: what each dimension does, over the default span how strongly too"
    )
    steps: int = Field(11, ge=2, le=MOST_STEPS, description="columns")
    size: int = Field(56, ge=8, le=256, description="longer side of each drawing in pixels")

    @model_validator(mode="after")
    def _upwards(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low is {self.low:g} and high {self.high:g}; low must be less")
        return self


class MorphQuery(_Query):
    start: Token = Field(alias="from", description="pose token that it begins with")
    to: Token = Field(description="pose token that it ends with")
    steps: int = Field(9, ge=2, le=MOST_STEPS, description="drawings in the strip, both ends among them")
    size: int = Field(112, ge=8, le=256, description="longer side of each drawing in pixels")


class Seen(BaseModel):
    label: str = Field(description="its class")
    probability: float = Field(description="its capsule's length")
    pose: str = Field(description="token for GET /reconstruct; it holds class and pose, the server keeps nothing")
    reconstruction: str | None = Field(None, description="data URI of a PNG; absent with reconstruct=false")


class Prediction(BaseModel):
    model: str
    label: str = Field(description="class of the longest capsule, whatever the verdict")
    probabilities: list[float] = Field(description="capsule lengths, in the order of the model's classes; they need not sum to 1")
    objects: list[Seen] = Field(description="digits seen, the longest capsule first; most models see one a picture")
    reconstruction_error: float = Field(description="mean squared difference between picture and drawing, per pixel")
    verdict: Verdict = Field(
        description=f"by length, lead and drawing; of digits {UNSURE_SHARE:.0%} at most are unsure or worse, "
        f"{NOT_A_DIGIT_SHARE:.0%} not_a_digit"
    )
    input: str | None = Field(None, description="data URI of a PNG, the picture as the network took it; only with input=true")


class Predictions(BaseModel):
    model: str
    predictions: list[Prediction]


class Pixels(BaseModel):
    model: str
    labels: list[str] = Field(description="class of each drawing")
    images: list[list[list[list[float]]]] = Field(description="drawings, channels, rows, columns; 0 is black, 1 white")


class NamedDimension(BaseModel):
    dim: int
    name: str
    strength: float = Field(
        description=f"what turning it from {-REACH} to {REACH} changes, in standard deviations of what it names"
    )


class ModelSummary(BaseModel):
    name: str
    version: str
    default: bool
    variant: Variant
    provider: str = Field(description="ONNX Runtime's execution provider that runs it")
    classes: list[str]
    image_shape: list[int]
    pose_size: int
    dimensions: list[NamedDimension] = Field(description="pose dimensions that do the same to nearly all drawings")
    graphs: dict[str, str] = Field(description="sha256 of the graphs that answer, by file; of two encoders only one does")


class Reloaded(BaseModel):
    models: dict[str, Change] = Field(description="each model that was or is served")


class ModelDetail(ModelSummary):
    manifest: dict[str, Any]


class Models(BaseModel):
    models: list[ModelSummary]


class Readiness(BaseModel):
    ready: bool
    state: State


class Liveness(BaseModel):
    live: bool


class V2Server(BaseModel):
    name: str
    version: str
    extensions: list[str]


class V2Readiness(BaseModel):
    live: bool
    ready: bool


class V2Tensor(BaseModel):
    name: str
    datatype: str
    shape: list[int] = Field(description="-1 is an axis of any size")


class V2Model(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[V2Tensor]
    outputs: list[V2Tensor]


class V2ModelReadiness(BaseModel):
    name: str
    ready: bool


class V2Output(BaseModel):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] | None = Field(None, description="binary_data_size, of an output whose bytes follow the JSON")
    data: list[float] | None = Field(None, description="row by row, where it was not asked for in binary")


class V2Inference(BaseModel):
    model_name: str
    model_version: str | None = None
    id: str | None = Field(None, description="the request's own")
    outputs: list[V2Output]


class Problem(BaseModel):
    """RFC 9457, and `error`, the same sentence where clients of the Open Inference Protocol look for it."""

    type: str
    title: str
    status: int
    detail: str
    error: str
