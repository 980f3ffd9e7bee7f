"""The report of the publish check as a message: the same from the control plane and from the offline check."""

from __future__ import annotations

import dataclasses

from veneer.artifact import Report
from veneer.controlplane.v1 import catalog_pb2

_MATCHES = {
    "": catalog_pb2.BASE_MATCH_UNSPECIFIED,
    "NAMED": catalog_pb2.BASE_MATCH_NAMED,
    "OTHER_NAME": catalog_pb2.BASE_MATCH_OTHER_NAME,
    "NOT_NAMED": catalog_pb2.BASE_MATCH_NOT_NAMED,
}


def report_message(report: Report) -> catalog_pb2.ArtifactReport:
    """A report as a message."""
    fields = dataclasses.asdict(report)
    fields["base_match"] = _MATCHES[report.base_match]
    fields["by_module"] = [catalog_pb2.ModuleReport(**one) for one in fields["by_module"]]
    fields["limits"] = [catalog_pb2.LimitUse(**one) for one in fields["limits"]]
    return catalog_pb2.ArtifactReport(**fields)
