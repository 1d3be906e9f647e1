"""A load reports its progress tensor by tensor, in order, from none to all."""

import pytest
from support.plain_host import PlainHost
from support.tiny_target import write_tiny_target

from protocol.checkpoints.tensors import open_tensors
from protocol.config import TargetConfig
from protocol.errors import DaemonError, ProtocolError
from target_daemon.failures import typed_failures
from target_daemon.families.base import load_target
from target_daemon.progress import STEPS, ReportingSource


class Told(DaemonError):
    """The daemon was told to end."""


def test_a_load_reports_from_none_to_all_and_no_more_often_than_it_must(tmp_path):
    model = write_tiny_target(tmp_path, num_hidden_layers=20)
    reports = []
    config = TargetConfig(model=str(model), run_dir="", life=0)
    load_target(config, PlainHost(), lambda *report: reports.append(report))
    total = len(open_tensors(model).names())
    assert total > STEPS
    assert reports[0] == (0, total)
    assert reports[-1] == (total, total)
    assert reports == sorted(set(reports))
    assert len(reports) <= STEPS + 1


def test_what_the_reporter_raises_ends_the_load(tmp_path):
    model = write_tiny_target(tmp_path)

    def progress(done, total):
        if done > total // 2:
            raise Told("told to end")

    with pytest.raises(Told):
        load_target(TargetConfig(model=str(model), run_dir="", life=0), PlainHost(), progress)


def test_a_tensor_that_is_read_twice_counts_once(tmp_path):
    reports = []
    with open_tensors(write_tiny_target(tmp_path)) as tensors:
        source = ReportingSource(tensors, lambda *report: reports.append(report))
        name = "model.norm.weight"
        assert source.shape(name) == tuple(source.get(name).shape)
        source.get(name)
    assert [done for done, _ in reports] == [0, 1]


def test_a_typed_error_passes_through_a_forward_unchanged():
    with pytest.raises(ProtocolError, match="as it was"), typed_failures("forward"):
        raise ProtocolError("as it was")
