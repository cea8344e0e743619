"""Warm-up requests: the bytes are TensorFlow Serving's, and what fits no signature is told by line or record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.errors import BadInputError, CorruptFileError, UsageError
from kvtools.model_requests import InputSpec, KnownIds
from kvtools.tfrecord import framed, read_records
from kvtools.warmup import (
    MOST_RECORDS,
    RequestFile,
    WarmupRequest,
    logged_request,
    prediction_log,
    random_requests,
    write_requests,
)

SIGNATURES = {
    "serving_default": [InputSpec("ids", "int64", (-1, 2)), InputSpec("word", "string", (-1,))],
    "one": [InputSpec("x", "float32", (-1,))],
    "half": [InputSpec("h", "bfloat16", None), InputSpec("on", "bool", ())],
    "pooled": [
        InputSpec("bag", "int64", (-1, 2)),
        InputSpec("bag_1", "int64", (-1,)),
        InputSpec("bag_2", "int64", (2,)),
    ],
    "ragged": [InputSpec("r", "int32", (-1,)), InputSpec("r_1", "int64", (-1,))],
}


def same(a: WarmupRequest, b: WarmupRequest) -> bool:
    return a.signature == b.signature and all(
        np.array_equal(array, b.inputs[name]) and array.dtype == b.inputs[name].dtype
        for name, array in a.inputs.items()
    )


@pytest.fixture
def everything() -> list[WarmupRequest]:
    import ml_dtypes

    return [
        WarmupRequest(
            "serving_default", {"ids": np.array([[1, -(1 << 62)]]), "word": np.array([b"\xff\x00"], dtype=object)}
        ),
        WarmupRequest("one", {"x": np.float32([])}),
        WarmupRequest("half", {"h": np.array([[1.5], [-2]], ml_dtypes.bfloat16), "on": np.array(True)}),
    ]


def test_serving_reads_what_is_written(tf: Any, everything: list[WarmupRequest], tmp_path: Path) -> None:
    prediction_log_pb2 = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    write_requests(tmp_path / "extra" / "file", [prediction_log(request) for request in everything])
    for data, request in zip(
        tf.data.TFRecordDataset(str(tmp_path / "extra" / "file")).as_numpy_iterator(), everything, strict=True
    ):
        log = prediction_log_pb2.PredictionLog.FromString(data)
        assert log.WhichOneof("log_type") == "predict_log"
        predict = log.predict_log.request
        assert predict.model_spec.signature_name == request.signature
        got = {name: tf.make_ndarray(tensor) for name, tensor in predict.inputs.items()}
        assert same(request, WarmupRequest(request.signature, got))


def test_what_serving_writes_is_read(tf: Any, everything: list[WarmupRequest], tmp_path: Path) -> None:
    prediction_log_pb2 = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    with tf.io.TFRecordWriter(str(tmp_path / "file")) as writer:
        for request in everything:
            log = prediction_log_pb2.PredictionLog()
            log.predict_log.request.model_spec.name = "any"
            log.predict_log.request.model_spec.signature_name = request.signature
            for name, array in request.inputs.items():
                # As lists of values, and not raw bytes, where TensorFlow writes them so.
                tensor = tf.make_tensor_proto(array.tolist() if array.dtype == object else array, shape=array.shape)
                if array.dtype == np.int64:
                    tensor.tensor_content = b""
                    tensor.int64_val.extend(array.reshape(-1).tolist())
                log.predict_log.request.inputs[name].CopyFrom(tensor)
            writer.write(log.SerializeToString())
    written = [*read_records(tmp_path / "file")]
    for data, request in zip(written, everything, strict=True):
        assert same(request, logged_request(data, SIGNATURES))
    assert RequestFile(tmp_path / "file").records(SIGNATURES) == written


def test_classifications_and_regressions_are_read(tf: Any, tmp_path: Path) -> None:
    signatures = {**SIGNATURES, "examples": [InputSpec("inputs", "string", (-1,))]}
    prediction_log_pb2 = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    example = tf.train.Example()
    example.features.feature["id"].int64_list.value.append(7)
    context = tf.train.Example()
    context.features.feature["user"].int64_list.value.append(9)
    classify, regress, wrong = (prediction_log_pb2.PredictionLog() for _ in range(3))
    request = classify.classify_log.request
    request.model_spec.signature_name = "examples"
    request.input.example_list.examples.extend([example, tf.train.Example()])
    request = regress.regress_log.request
    request.model_spec.signature_name = "examples"
    request.input.example_list_with_context.examples.append(example)
    request.input.example_list_with_context.context.CopyFrom(context)
    write_requests(tmp_path / "file", [log.SerializeToString() for log in (classify, regress)])
    two, one = (request.inputs["inputs"] for request in RequestFile(tmp_path / "file").requests(signatures))
    assert two.tolist() == [example.SerializeToString(), b""]
    both = tf.train.Example.FromString(one[0]).features.feature
    assert both["id"].int64_list.value[:] == [7] and both["user"].int64_list.value[:] == [9]
    wrong.regress_log.request.input.example_list.examples.append(example)
    with pytest.raises(ValueError, match="got the inputs inputs, the signature takes ids, word"):
        logged_request(wrong.SerializeToString(), signatures)
    request.input.Clear()
    with pytest.raises(ValueError, match="it has no examples"):
        logged_request(regress.SerializeToString(), signatures)


def test_bodies_of_the_rest_interface(tmp_path: Path) -> None:
    bodies = [
        {"instances": [{"ids": [1, 2], "word": "a"}, {"ids": [3, 4], "word": {"b64": "AP8="}}]},
        {"signature_name": "one", "instances": [1, 2.5]},
        {"signature_name": "one", "inputs": [3]},
        {"signature_name": "half", "inputs": {"h": [[1]], "on": True}},
    ]
    (tmp_path / "file").write_text("\n\n".join(json.dumps(body) for body in bodies))
    read = [logged_request(log, SIGNATURES) for log in RequestFile(tmp_path / "file").records(SIGNATURES)]
    assert read[0].inputs["ids"].tolist() == [[1, 2], [3, 4]]
    assert read[0].inputs["word"].tolist() == [b"a", b"\x00\xff"]
    assert [request.inputs["x"].tolist() for request in read[1:3]] == [[1, 2.5], [3]]
    assert read[3].inputs["h"].tolist() == [[1]] and read[3].inputs["on"].shape == ()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "line 2: Expecting property name"),
        (
            '{"signature_name": "none", "inputs": 1}',
            "line 2: there is no signature 'none', but 'serving_default', 'one'",
        ),
        ('{"signature_name": "one"}', "line 2: expected 'instances' or 'inputs', one of them"),
        ('{"signature_name": "one", "inputs": [[1]]}', r"line 2: input 'x': expected shape \[-1\], got \[1, 1\]"),
        ('{"signature_name": "one", "inputs": ["a"]}', "line 2: input 'x': expected float32: got <U1"),
        ('{"signature_name": "one", "inputs": [[1], 2]}', "line 2: input 'x': expected float32"),
        ('{"inputs": {"ids": [[1, 2]]}}', "line 2: got the inputs ids, the signature takes ids, word"),
        ('{"inputs": [[1, 2]]}', "line 2: expected an object of the inputs ids, word"),
        ('{"inputs": {"ids": [[1.5, 2]], "word": ["a"]}}', "line 2: input 'ids': expected int64"),
        ('{"inputs": {"ids": [[1, 2]], "word": [1]}}', "line 2: input 'word': expected strings"),
        ('{"inputs": {"ids": [[1, 2]], "word": ["\\ud800"]}}', "line 2: input 'word': .* half a surrogate pair"),
    ],
)
def test_a_body_that_fits_no_signature_is_told_by_its_line(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "file").write_text('{"signature_name": "one", "instances": [1]}\n' + body)
    with pytest.raises(BadInputError, match=message):
        RequestFile(tmp_path / "file").records(SIGNATURES)


def test_files_that_are_none_are_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(BadInputError, match="No such file"):
        RequestFile(file)
    file.write_text("ids,word\n1,a\n")
    with pytest.raises(BadInputError, match="expected requests of TensorFlow Serving's REST interface"):
        RequestFile(file)
    good = framed(prediction_log(WarmupRequest("one", {"x": np.float32([1])})))
    for bad in (good[:-1], good[:20] + b"?" + good[21:], good[:6]):
        file.write_bytes(good + bad)
        with pytest.raises(CorruptFileError, match="record 2 is damaged or cut"):
            RequestFile(file)
    for record in (b"\x0a\x00", b"\xff", prediction_log(WarmupRequest("one", {"y": np.float32([1])}))):
        file.write_bytes(good + framed(record))
        with pytest.raises(BadInputError, match="record 2: "):
            RequestFile(file).records(SIGNATURES)
    file.write_bytes(good * (MOST_RECORDS + 1))
    with pytest.raises(BadInputError, match="it has 1,001 requests, and TensorFlow Serving takes 1,000"):
        RequestFile(file)


def test_random_requests_have_the_signatures_inputs_and_keys_that_are_there() -> None:
    keys = np.array([5, 7, 1 << 40])
    ids = KnownIds(keys, np.random.default_rng(0))
    records, notes = random_requests(SIGNATURES, 3, lambda _: ids)
    made = [logged_request(record, SIGNATURES) for record in records]
    assert [request.signature for request in made] == [*SIGNATURES] * 3
    for request in made:
        if request.signature == "serving_default":
            assert np.isin(request.inputs["ids"], keys).all()
        if request.signature == "pooled":
            assert len(request.inputs["bag"]) == len(request.inputs["bag_1"])
            assert np.isin(request.inputs["bag_1"], keys).all()
        if request.signature == "ragged":
            assert request.inputs["r_1"][-1] == len(request.inputs["r"])
            assert np.isin(request.inputs["r"], keys[:2]).all()
    assert notes == ["signature 'ragged': 'r' and 'r_1' were taken for a ragged tensor; --check asks the model"]


def test_a_model_that_is_asked_says_which_requests_it_takes() -> None:
    ids = KnownIds(np.array([5]), np.random.default_rng(0))

    def refusal(signature: str, request: Any) -> str:
        if signature == "one":
            return "too hot"
        return "not alone" if signature == "ragged" and len(request["r"]) != len(request["r_1"]) else ""

    records, notes = random_requests(SIGNATURES, 1, lambda _: ids, refusal)
    made = {request.signature: request for request in (logged_request(record, SIGNATURES) for record in records)}
    assert sorted(made) == ["half", "pooled", "ragged", "serving_default"]
    assert len(made["ragged"].inputs["r"]) == len(made["ragged"].inputs["r_1"])
    assert notes == ["signature 'one' is not warmed up: the model refuses random requests (too hot)"]


def test_there_are_no_more_than_serving_takes() -> None:
    ids = KnownIds(np.array([5]), np.random.default_rng(0))
    signatures = {str(number): [InputSpec("x", "bool", ())] for number in range(600)}
    records, notes = random_requests(signatures, 2, lambda _: ids)
    assert len(records) == MOST_RECORDS
    assert notes == ["1,000 requests for 600 signatures, and not 2 of each: TensorFlow Serving takes no more"]
    with pytest.raises(UsageError, match="got --warmup 1001, expected 1 to 1000"):
        random_requests(signatures, 1001, lambda _: ids)
