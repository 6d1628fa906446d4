"""The Grafana dashboard: what it asks Prometheus for is what `/metrics` tells."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.http.serving import Server

DASHBOARD = Path(__file__).resolve().parents[2] / "tools" / "grafana.json"
NAME = re.compile(r"(?:peg:|process_)\w+")


def test_every_metric_of_the_dashboard_is_there(server: Server) -> None:
    """Each name and each label that a panel uses is on the page from the start; no panel hides another."""
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    panels: list[dict[str, Any]] = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    server.get("/health")  # HTTP answers are counted by status, so one has to be there
    page = server.get("/metrics").body.decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    told = {sample.name: sample.labels.keys() for sample in samples}
    for target in (target for panel in panels for target in panel["targets"]):
        names = NAME.findall(target["expr"])
        assert names, target
        assert [name for name in names if name not in told] == [], target
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert label in told[names[0]], target
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)
