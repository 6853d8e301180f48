"""Everything that can be wrong with a request: each fault gets its 4xx and a sentence, and the server goes on."""

from __future__ import annotations

import base64
import gc
import gzip
import json
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo

from service import images, pngfile
from service.engine import CapsNet
from service.errors import MalformedRequest, Unprocessable
from service.web import multipart
from tests.service.conftest import drawn, encoded, serving, settings
from tests.service.test_metrics import samples
from tests.waiting import until

LIMIT = 200_000
OPTIONS = ", and put options into the query: ?model=NAME"


@contextmanager
def within_a_second() -> Iterator[None]:
    """Expects less than a second of this thread's CPU time, however busy the machine; before the refusals it took several."""
    began = time.thread_time()
    yield
    assert time.thread_time() - began < 1


@pytest.fixture(scope="module")
def limited(nets: dict[str, CapsNet]) -> Iterator[httpx.Client]:
    """A server with small limits."""
    with serving(settings(max_body=LIMIT, max_pixels=1_000_000, patience=0.5, max_images=3), nets) as client:
        yield client


def bomb(side: int = 20_000) -> bytes:
    """Makes a PNG of a few kilobytes whose header announces side times side pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    packer = zlib.compressobj(9)
    lines = b"".join(packer.compress(bytes(side + 1)) for _ in range(side // 100)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


def refused(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    said = answer.json()
    assert said["status"] == status
    assert "Traceback" not in answer.text
    return str(said["detail"])


def test_normalise_none_sees_a_large_jpeg_at_full_size(client: httpx.Client) -> None:
    """A large JPEG is decoded at a fraction of its size only if it is to be normalised."""
    large = encoded(Image.new("L", (2000, 1500)), "JPEG")
    assert "this one is 2000x1500" in refused(client.post("/predict?normalise=none", content=large), 422)


PICTURES = {
    "empty": (b"", 422),
    "not an image": (b"hello", 415),
    "TIFF renamed": (encoded(drawn("7"), "TIFF"), 415),
    "GIF": (encoded(drawn("7"), "GIF"), 415),
    "truncated": (encoded(drawn("7"))[:200], 422),
    "signature alone": (b"\x89PNG\r\n\x1a\n", 422),
    "too many pixels": (bomb(), 413),
    "too long a side": (encoded(Image.new("L", (1, 20_001))), 413),
}


@pytest.mark.parametrize(("data", "status"), PICTURES.values(), ids=PICTURES)
def test_invalid_pictures_are_refused(limited: httpx.Client, data: bytes, status: int) -> None:
    assert refused(limited.post("/predict", content=data, headers={"Content-Type": "image/png"}), status)
    assert refused(limited.post("/predict", files={"file": data}), status)


@pytest.mark.parametrize("text", [b"seven.png", base64.b64encode(encoded(drawn("7")))], ids=["its name", "base64"])
def test_text_sent_as_a_picture_is_refused_as_text(limited: httpx.Client, text: bytes) -> None:
    """What `curl -F file=seven.png` sends, with the @ forgotten."""
    told = f"these {len(text)} bytes are text; send the picture file's content, not its name or base64"
    assert told in refused(limited.post("/predict", files={"file": text}), 415)


@pytest.mark.parametrize("path", ["/predict", "/predict/batch"])
def test_json_without_its_content_type_is_told_which_to_send(limited: httpx.Client, path: str) -> None:
    """What `curl -d` sends."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert "as JSON with Content-Type: application/json" in refused(
        limited.post(path, content=b'{"image": ""}', headers=form), 415
    )


def test_a_404_mentions_a_trailing_slash(limited: httpx.Client) -> None:
    lists = "there is nothing at this path; /docs lists what there is"
    assert refused(limited.post("/predict/"), 404) == f"{lists}, without a slash at its end"
    assert refused(limited.post("/predictions"), 404) == lists


@pytest.mark.parametrize("size", [(1, 1), (2, 400)])
def test_pictures_under_3_pixels_a_side_are_refused(limited: httpx.Client, size: tuple[int, int]) -> None:
    speck = encoded(Image.new("L", size))
    told = refused(limited.post("/predict", files={"file": speck}), 422)
    assert (
        told
        == f"expected a picture at least 3 pixels wide and high, found {size[0]}x{size[1]}; that shows no digit: send it larger"
    )
    assert refused(limited.post("/predict/batch", files=[("file", encoded(drawn("7"))), ("file", speck)]), 422).startswith(
        "picture 1:"
    )


def test_a_blank_3x3_picture_is_accepted_as_not_a_digit(limited: httpx.Client) -> None:
    assert limited.post("/predict", files={"file": encoded(Image.new("L", (3, 3)))}).json()["verdict"] == "not_a_digit"


def test_a_body_over_the_limit_is_413_with_or_without_content_length(limited: httpx.Client) -> None:
    def unannounced() -> Iterator[bytes]:
        for _ in range(20):
            yield bytes(LIMIT // 10)

    assert "200,000" in refused(limited.post("/predict", content=bytes(LIMIT + 1), headers={"Content-Type": "image/png"}), 413)
    assert "200,000" in refused(limited.post("/predict", content=unannounced(), headers={"Content-Type": "image/png"}), 413)


BODIES = {
    "form": ("application/x-www-form-urlencoded", b"file=1", 415),
    "text": ("text/plain", b"7", 415),
    "no boundary": ("multipart/form-data", b"--x\r\n\r\n--x--", 400),
    "no closing boundary": (
        "multipart/form-data; boundary=x",
        b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc',
        400,
    ),
    "part without headers": ("multipart/form-data; boundary=x", b"--x\r\nabc\r\n--x--\r\n", 400),
    "part without name": ("multipart/form-data; boundary=x", b"--x\r\nContent-Type: image/png\r\n\r\nabc\r\n--x--\r\n", 400),
    "another field": (
        "multipart/form-data; boundary=x",
        b'--x\r\nContent-Disposition: form-data; name="f"\r\n\r\na\r\n--x--',
        400,
    ),
    "no parts": ("multipart/form-data; boundary=x", b"--x--\r\n", 400),
    "not JSON": ("application/json", b"{", 400),
    "deep JSON": ("application/json", b"[" * 900, 400),
    "JSON list": ("application/json", b"[]", 400),
    "no image": ("application/json", b"{}", 400),
    "image is a number": ("application/json", b'{"image": 7}', 400),
    "not base64": ("application/json", b'{"image": "a*b"}', 400),
    "not UTF-8": ("application/json", b'{"image": "\xff"}', 400),
}


@pytest.mark.parametrize(("kind", "content", "status"), BODIES.values(), ids=BODIES)
def test_malformed_bodies_are_refused(limited: httpx.Client, kind: str, content: bytes, status: int) -> None:
    assert refused(limited.post("/predict", content=content, headers={"Content-Type": kind}), status)


SENT = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc\r\n--x--\r\n'


@pytest.mark.parametrize(
    ("kind", "content", "says"),
    [
        ("multipart/form-data; boundary=y", SENT, "the boundary that Content-Type names is nowhere in"),
        ("multipart/form-data; boundary=x", b"", "there is nothing (0 bytes) in"),
        ("image/png", SENT, "the body is multipart/form-data but Content-Type says image/png"),
        ("application/json", SENT, "says application/json"),
        ("", SENT, "says nothing"),
        ("image/png; boundary=x", SENT.replace(b"form-data", b"attachment"), "says image/png"),  # which curl writes in this case
    ],
    ids=["another boundary", "nothing", "a picture", "JSON", "no type", "curl's"],
)
def test_a_content_type_that_does_not_match_the_body_is_explained(
    limited: httpx.Client, kind: str, content: bytes, says: str
) -> None:
    """As when somebody copied the header from a browser, or replaced the one that their client sets."""
    for path in ("/predict", "/predict/batch"):
        told = refused(limited.post(path, content=content, headers={"Content-Type": kind}), 400)
        assert says in told
        assert told.endswith("leave that header to your HTTP client")


def test_excessive_multipart_headers_are_refused_quickly() -> None:
    """Python parses them on the event loop: ten megabytes take seconds. It reads 16 headers a part and 16 parameters a header."""
    head = b"Content-Disposition: form-data; name=file" + b";a=b" * 2_500
    body = (b"--x\r\n" + head + b"\r\n\r\nabc\r\n") * 999 + b"--x--"
    with within_a_second(), pytest.raises(MalformedRequest, match="too many bytes of headers"):
        multipart.parse("multipart/form-data; boundary=x", body)
    for start, more, end in ((b"", b"a:b\r\n", b'Content-Disposition: form-data; name="f"'), (head[:30], b";a=b", b"; name=f")):
        few, many = (b"--x\r\n" + start + more * count + end + b"\r\n\r\nabc\r\n--x--" for count in (15, 16))
        assert multipart.parse("multipart/form-data; boundary=x", few)[0].name == "f"
        with pytest.raises(MalformedRequest, match="has no name"):
            multipart.parse("multipart/form-data; boundary=x", many)


def test_the_boundary_parameter_name_is_case_insensitive() -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc\r\n--x--\r\n'
    assert multipart.parse("multipart/form-data; BOUNDARY=x", body)[0].content == b"abc"


@pytest.mark.parametrize("path", ["/predict", "/predict/batch"])
def test_a_compressed_body_gets_415_and_accept_encoding_identity(limited: httpx.Client, seven: bytes, path: str) -> None:
    answer = limited.post(path, content=gzip.compress(seven), headers={"Content-Type": "image/png", "Content-Encoding": "gzip"})
    assert "uncompressed" in refused(answer, 415)
    assert answer.headers["Accept-Encoding"] == "identity"


def test_requests_with_too_few_or_too_many_pictures_are_refused(limited: httpx.Client, seven: bytes) -> None:
    assert "1 to 3" in refused(limited.post("/predict/batch", files=[("file", seven)] * 4), 400)
    assert "1 to 3 pictures, found 0; send at least one" in refused(limited.post("/predict/batch", json={"images": []}), 400)
    assert "/predict/batch" in refused(limited.post("/predict", files=[("file", seven)] * 2), 400)
    assert "more than 1000 parts" in refused(limited.post("/predict", files=[("file", b"7")] * 1_001), 400)
    assert refused(limited.post("/predict/batch", json={"images": [7] * 1_001}), 413).startswith("more than 1,000 values in JSON")


def test_an_invalid_picture_in_a_batch_is_named_by_its_index(limited: httpx.Client, seven: bytes) -> None:
    good = base64.b64encode(seven).decode()
    for bad in ("a*b", "AAAA\nAAAA"):
        told = refused(limited.post("/predict/batch", json={"images": [good, bad]}), 400)
        assert told.startswith("picture 1 is not valid base64")
    assert refused(limited.post("/predict", json={"image": "a*b"}), 400).startswith("a picture is not valid base64")


def test_unexpected_json_is_refused_with_what_is_expected(limited: httpx.Client, seven: bytes) -> None:
    told = refused(limited.post("/predict", json={}), 400)
    assert (
        told
        == 'image is missing: give the picture\'s bytes in base64, or a data URI of them; send {"image": "<base64>"}' + OPTIONS
    )
    told = refused(limited.post("/predict", files={"file": seven, "model": b"tiny"}), 400)
    assert told == "a multipart field is called 'model'; call each picture's field 'file'" + OPTIONS
    told = refused(limited.post("/predict/batch", json={"images": ["", 7]}), 400)
    assert told == 'images[1]: expected text, found 7; send {"images": ["<base64>", ...]}' + OPTIONS
    assert refused(limited.post("/predict", json={"image": {}}), 400).startswith("image: expected text, found an object")
    marked = b'\xef\xbb\xbf{"image": "' + base64.b64encode(seven) + b'"}'  # with a byte-order mark, as some editors write it
    assert limited.post("/predict", content=marked, headers={"Content-Type": "application/json"}).status_code == 200
    for path in ("/predict", "/predict/batch", "/v2/models/tiny/infer"):
        for wide in ("utf-16", "utf-16-be", "utf-32"):
            wider = limited.post(path, content="{}".encode(wide), headers={"Content-Type": "application/json"})
            assert "is not JSON in UTF-8 but in UTF-16 or 32: " in refused(wider, 400)
        black = limited.post(path, content=bytes(28 * 28 * 4), headers={"Content-Type": "application/json"})  # float32 pixels
        assert "is not JSON: " in refused(black, 400)


def test_configured_limits_override_built_in_ones(nets: dict[str, CapsNet]) -> None:
    """The limit of pixels may be below what the event loop decodes, and that of pictures above a form's usual number of parts."""
    with serving(settings(max_pixels=1_000, max_images=1_200, max_queue=2_000), nets) as client:
        told = refused(client.post("/predict", content=encoded(drawn("7", 40))), 413)
        assert "40x40 pixels" in told
        told = refused(client.post("/predict/batch", files=[("file", b"no picture")] * 1_100), 415)
        assert told.startswith("picture 0: ")
        told = refused(client.post("/predict/batch", json={"images": [7] * 1_001}), 400)
        assert told.startswith("there are 1,001 faults in the body")


def test_invalid_query_parameters_are_refused(limited: httpx.Client, seven: bytes) -> None:
    assert "normalise: expected auto or none, found yes" in refused(
        limited.post("/predict?normalise=yes", files={"file": seven}), 422
    )
    assert "the query takes model, normalise, reconstruct, input, not colour" in refused(
        limited.post("/predict?colour=red", files={"file": seven}), 422
    )
    assert "more than once" in refused(limited.post("/predict?model=tiny&model=tiny", files={"file": seven}), 422)
    assert "tiny" in refused(limited.post("/predict?model=resnet", files={"file": seven}), 404)


def test_unknown_paths_and_methods_are_refused(limited: httpx.Client) -> None:
    assert "/docs" in refused(limited.get("/nowhere"), 404)
    answer = limited.get("/predict")
    assert refused(answer, 405)
    assert answer.headers["Allow"] == "POST"
    answer = limited.delete("/models")
    assert "takes GET, HEAD and not DELETE" in refused(answer, 405)
    assert answer.headers["Allow"] == "GET, HEAD"
    asked = {"Origin": "http://another.example", "Access-Control-Request-Method": "POST"}
    assert "pages of other origins get no answers here" in refused(limited.options("/predict", headers=asked), 405)


@pytest.mark.parametrize("path", ["/models", "/models/tiny", "/v2", "/v2/models/tiny"])
def test_paths_without_query_parameters_refuse_them(limited: httpx.Client, path: str) -> None:
    assert refused(limited.get(path, params={"verbose": "1"}), 422) == (
        "this path takes no query parameters, found 'verbose'; leave it out"
    )


@pytest.mark.parametrize(
    "path", ["/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready"]
)
def test_probes_accept_any_query(limited: httpx.Client, path: str) -> None:
    """Some probes add one to avoid caches, and a scrape may have its own; the answer does not depend on it."""
    assert limited.get(path, params={"name[]": "1"}).status_code == 200


def test_refusals_do_not_repeat_messages_of_libraries(limited: httpx.Client, seven: bytes) -> None:
    """Libraries' own messages name neither the whole range nor what to do."""
    answers = [
        limited.get(f"/reconstruct{query}") for query in ("?size=0", "?size=x", "?as_label=1", "?dim=x&delta=1", "?nope=1")
    ]
    answers += [limited.get(f"/reconstruct/morph{query}") for query in ("", "?from=a&to=b&steps=99")]
    bodies = (b"{", b"[]", b"{}", b'{"inputs": 1}', b'{"inputs": [{"name": "images", "shape": [1, "a"], "datatype": "FP32"}]}')
    answers += [limited.post("/v2/models/tiny/infer", content=body) for body in bodies]
    answers += [limited.post(f"/predict{query}", files={"file": seven}) for query in ("?reconstruct=x", "?model=" + "m" * 99)]
    for answer in answers:
        assert 400 <= answer.status_code < 500, answer.text
        told = refused(answer, answer.status_code)
        for words in ("Value error", "Input should", "Field required", "Extra inputs", "valid integer", "unable to"):
            assert words not in told
        assert not told.startswith(":")


def test_the_total_size_of_all_bodies_is_limited(nets: dict[str, CapsNet], seven: bytes) -> None:
    with serving(settings(max_body=LIMIT), nets) as client, ExitStack() as opened:
        host, port = client.base_url.host, client.base_url.port
        for _ in range(16):
            connection = opened.enter_context(socket.create_connection((host, port), timeout=5))
            head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: {LIMIT}\r\n\r\n"
            connection.sendall(head.encode() + bytes(LIMIT - 1))
        until = time.monotonic() + 10
        while samples(client)["capserve_body_bytes",] < 16 * (LIMIT - 1):
            assert time.monotonic() < until
        answer = client.post("/predict", files={"file": seven})
        assert "memory" in refused(answer, 503)
        assert answer.headers["Retry-After"] == "1"
        opened.close()  # they disconnect, and what they sent is released
        while (answer := client.post("/predict", files={"file": seven})).status_code == 503:
            assert time.monotonic() < until
        assert answer.status_code == 200


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    """Each scan takes forty bytes and costs a pass over all pixels: a small file would keep a decoder busy for minutes."""
    data = encoded(drawn("7", 1_000), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    bomb = data[:last] + data[last:-2] * 200 + data[-2:]
    with within_a_second(), pytest.raises(Unprocessable, match="more than 100 scans; save it again, not progressive"):
        images.read(bomb, 25_000_000)
    assert images.read(data, 25_000_000).size == (1_000, 1_000)
    large = encoded(drawn("7", 4_000), "JPEG", progressive=True)
    last = large.rindex(b"\xff\xda")
    with pytest.raises(Unprocessable, match=r"has \d\d scans of 16,000,000 pixels"):
        images.read(large[:last] + large[last:-2] * 60 + large[-2:], 25_000_000)
    assert images.read(large, 25_000_000).size == images.read(large[:last] + large[last:-2] * 60 + large[-2:], 100_000_000).size


def _run_length_bmp(width: int, height: int, runs: bytes) -> bytes:
    """A BMP of 256 greys."""
    greys = b"".join(bytes((level, level, level, 0)) for level in range(256))
    start = 14 + 40 + len(greys)
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 2_835, 2_835, 256, 0)
    return b"BM" + struct.pack("<IHHI", start + len(runs), 0, 0, start) + header + greys + runs


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param(_run_length_bmp(19_999, 1_250, b"\x01\x05\x00\x00" * 1_250), id="lines of one pixel"),
        pytest.param(_run_length_bmp(1_000, 1_000, b"\x00\x02\x00\x00" * 1_000_000), id="steps that go nowhere"),
    ],
)
def test_a_large_run_length_encoded_bmp_is_refused_before_unpacking(bomb: bytes) -> None:
    """Pillow unpacks it in Python: six kilobytes keep a thread busy for seconds."""
    with within_a_second(), pytest.raises(Unprocessable, match="this run-length-encoded BMP"):
        images.read(bomb, 25_000_000)


def test_a_small_run_length_encoded_bmp_is_read() -> None:
    picture = images.read(_run_length_bmp(300, 200, (b"\xff\x07\x2d\x09\x00\x00") * 200), 25_000_000).convert("L")
    assert (picture.size, picture.getpixel((254, 9)), picture.getpixel((255, 9))) == ((300, 200), 7, 9)


@pytest.mark.parametrize("marker", [b"\xff\x01", b"\xff\xc0\x00\x00"])
def test_a_jpeg_of_nothing_but_markers_is_refused_quickly(marker: bytes) -> None:
    """Python looks at each marker, while all other threads wait for the GIL."""
    with within_a_second(), pytest.raises(Unprocessable, match="more than 1,000 markers"):
        images.read(b"\xff\xd8" + marker * 1_000_000, 25_000_000)


@pytest.mark.parametrize("padding", [b"\xff\x00", b"\xff\xff", b"ab", b"\xff\xd0"])
def test_a_jpeg_of_nothing_but_padding_is_refused_quickly(padding: bytes) -> None:
    data = encoded(drawn("7", 100), "JPEG")
    assert images.read(data[:20] + padding * 1_000 + data[20:], 25_000_000).size == (100, 100)
    with within_a_second(), pytest.raises(Unprocessable, match="little but padding"):
        images.read(b"\xff\xd8\xff" + padding * 5_000_000, 25_000_000)


@pytest.mark.parametrize(
    ("marker", "body"),
    [
        pytest.param(b"\xe1", b"Exif\0\0" + bytes(10_000), id="Exif, put together piece by piece"),
        pytest.param(b"\xed", b"Photoshop 3.0\0" + b"8BIM\x04\x04\0\0\0\0\0\0" * 5_000, id="Photoshop's"),
        pytest.param(b"\xdb", (b"\0" + b"\1" * 64) * 1_000, id="tables"),
        pytest.param(b"\xc0", struct.pack(">BHHB", 8, 28, 28, 1) + b"\1\x11\0" * 20_000, id="frames"),
    ],
)
def test_a_jpeg_with_excessive_metadata_is_refused_quickly(marker: bytes, body: bytes) -> None:
    data = encoded(drawn("7", 28), "JPEG")
    segment = b"\xff" + marker + struct.pack(">H", len(body) + 2) + body
    if marker != b"\xc0":  # of which a valid JPEG has one
        assert images.read(data[:2] + segment * 3 + data[2:], 25_000_000).size == (28, 28)
    with within_a_second(), pytest.raises(Unprocessable, match="more than 2,097,152 bytes of Exif, Photoshop's data and tables"):
        images.read(data[:2] + segment * 900 + data[2:], 25_000_000)


def _fractions(tag: int, count: int) -> bytes:
    """Makes Exif of a single tag, whose value is `count` fractions."""
    return b"MM\0*\0\0\0\x08\0\1" + struct.pack(">HHII", tag, 5, count, 26) + bytes(4) + b"\0\0\0\3\0\0\0\7" * count


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "text"])
@pytest.mark.parametrize("tag", [ExifTags.Base.Orientation, ExifTags.Base.XResolution])
def test_a_picture_with_exif_of_many_fractions_is_read_quickly(form: str, tag: int) -> None:
    """Each would become a Python object: ten megabytes took ten seconds, and two kilobytes of compressed text half a second."""
    raw, told = _fractions(tag, 250_000 if form == "JPEG" else 1_000_000), PngInfo()
    if form == "text":
        raw = raw[:400_000]  # Pillow reads at most a megabyte of text
        told.add_text("Raw profile type exif", f"\nexif\n{len(raw)}\n{raw.hex()}\n", zip=True)
        data = encoded(drawn("7", 28), "PNG", pnginfo=told)
    elif form == "JPEG":
        plain = encoded(drawn("7", 28), "JPEG")
        parts = (b"Exif\0\0" + raw[at : at + 65_000] for at in range(0, len(raw), 65_000))
        segments = (b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in parts)
        data = plain[:2] + b"".join(segments) + plain[2:]
    else:
        data = encoded(drawn("7", 28), form, exif=raw)
    began = time.thread_time()
    assert images.read(data, 25_000_000).size == (28, 28)
    assert time.thread_time() - began < 0.2


def test_a_jpeg_may_have_megabytes_of_unparsed_metadata() -> None:
    """For example, a telephone's depth map."""
    data = encoded(drawn("7", 28), "JPEG")
    body = b"http://ns.adobe.com/xmp/extension/\0" + bytes(65_000)
    segment = b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body
    assert images.read(data[:2] + segment * 150 + data[2:], 25_000_000).size == (28, 28)


@pytest.mark.parametrize("place", [at + near for at in (images.STRETCH, 3 * images.STRETCH) for near in range(-3, 4)])
def test_a_marker_is_found_wherever_it_stands(place: int) -> None:
    """Markers are searched for one stretch of bytes at a time."""
    data = bytes(7 + place) + b"\xff\xda" + bytes(100)
    found = images._next_marker(data, 7, len(data))
    assert found is not None
    assert found.start() == 7 + place
    assert images._next_marker(data, 7, 7 + place + 1) is None


@pytest.mark.parametrize(("kind", "body"), [(b"iCCP", b"a\0\0" + zlib.compress(bytes(900_000))), (b"prVt", b"")])
def test_a_png_of_nothing_but_metadata_is_refused_quickly(kind: bytes, body: bytes) -> None:
    data, at = encoded(drawn("7", 28)), pngfile.CHUNKS_AT
    chunk = struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    assert images.read(data[:at] + chunk * 100 + data[at:], 25_000_000).size == (28, 28)
    with within_a_second(), pytest.raises(Unprocessable, match="more than 200 chunks beside its pixels"):
        images.read(data[:at] + chunk * 5_000 + data[at:], 25_000_000)


def test_a_png_of_too_many_pixel_chunks_is_refused_quickly() -> None:
    data = encoded(drawn("7", 28))
    at, empty = data.index(b"IDAT") - 4, struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    assert images.read(data[:at] + empty * 10_000 + data[at:], 25_000_000).size == (28, 28)
    with within_a_second(), pytest.raises(Unprocessable, match="more than 20,000 chunks of pixels"):
        images.read(data[:at] + empty * 800_000 + data[at:], 25_000_000)


def test_trailing_bytes_after_a_png_are_ignored() -> None:
    for behind in (bytes(10_000), encoded(drawn("7", 28)) * 100):
        assert images.read(encoded(drawn("7", 28)) + behind, 25_000_000).size == (28, 28)


def test_an_undecodable_picture_is_freed_without_garbage_collection(client: httpx.Client) -> None:
    """The collector runs too seldom: a file of kilobytes may hold a hundred megabytes, and one client would fill any memory."""
    size = (1013, 1019)  # that no other picture has
    cut = encoded(Image.new("RGB", size))[:-20]
    as_json = base64.b64encode(cut).decode()
    gc.disable()
    try:
        for path, sent in (
            ("/predict", {"content": cut}),
            ("/predict", {"files": {"file": cut}}),
            ("/predict", {"json": {"image": as_json}}),
            ("/predict/batch", {"json": {"images": [as_json]}}),
        ):
            assert client.post(path, **sent).status_code == 422  # type: ignore[arg-type]
        until(lambda: [found for found in gc.get_objects() if isinstance(found, Image.Image) and found.size == size] == [])
    finally:
        gc.enable()


@pytest.mark.alone
def test_json_of_many_small_values_is_refused_quickly(client: httpx.Client) -> None:
    many, tensor = dict.fromkeys(map(str, range(100_000)), []), {"name": "images", "shape": [1, 1, 28, 28], "datatype": "FP32"}
    nested = b",".join([b"[" * 150 + b"]" * 150] * 30_000)
    sent = [
        ("/v2/models/tiny/infer", b'{"inputs":[' + b",".join([b"{}"] * 100_000) + b"]}", 400),
        ("/v2/models/tiny/infer", json.dumps({"inputs": [], "parameters": many}).encode(), 400),
        ("/v2/models/tiny/infer", json.dumps({"inputs": [tensor | {"parameters": many}]}).encode(), 400),
        ("/v2/models/tiny/infer", json.dumps({"inputs": [tensor | {"shape": ["x"] * 200_000}]}).encode(), 400),
        ("/predict", b'{"image":[' + b",".join([b"[]"] * 3_400_000) + b"]}", 413),
        ("/predict", json.dumps(many).encode(), 413),
        ("/predict", b'{"x":[' + nested + b"]}", 413),
        ("/v2/models/tiny/infer", b'{"inputs":[' + nested + b"]}", 413),
        ("/predict/batch", b'{"images":[' + b",".join([b'""'] * 900) + b"]}", 400),
        ("/predict/batch", b'{"images":[' + b",".join([b"0"] * 900) + b"]}", 400),
        ("/predict/batch?normalise=none", b'{"images":[' + b",".join([b'""'] * 1_000_000) + b"]}", 413),
    ]
    for path, body, status in sent:
        began = time.process_time()
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == status, answer.text
        assert time.process_time() - began < 0.6
