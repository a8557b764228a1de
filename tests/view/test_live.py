"""The live view: what fit writes, who may read it, and that an open page follows."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import tgfx
from tests.support.browser import chromium, complaints, open_page, wait_for
from tests.support.page_driver import needs_browser
from tests.support.view_models import EXAMPLE, Residual
from tgfx.errors import InputError, TrainingError
from tgfx.training.history import History
from tgfx.view.live import Live
from tgfx.view.server import LiveServer


def small() -> tgfx.GatedModule:
    torch.manual_seed(0)
    return tgfx.transform(Residual(stages=1), torch.randn(*EXAMPLE))


BATCHES = [(torch.randn(4, 3, 6, 6), torch.randint(4, (4,))) for _ in range(5)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[LiveServer, Live, tgfx.GatedModule, History]]:
    gated, history = small(), History(["stem", "stages.0.0.conv1"])
    live = Live(tmp_path, gated, history, total=10)
    with LiveServer(tmp_path) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running, live, gated, history
        running.shutdown()
        thread.join()


def ask(server: LiveServer, path: str, host: str | None = None, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_fit_leaves_the_last_state(tmp_path: Path) -> None:
    gated = small()
    result = tgfx.fit(
        gated, BATCHES, F.cross_entropy, budget={"flops": 0.5}, steps=30, progress=False, live=tmp_path / "run"
    )
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == ["index.html", "live.json"]
    state = json.loads((tmp_path / "run" / "live.json").read_text())
    assert state["state"] == "finished" and state["now"]["step"] == state["total"] == result.steps == 30
    assert [group["open"] for group in state["now"]["groups"][:2]] == [g.open_count() for g in gated.gates.values()]
    assert state["now"]["totals"]["flops"] == float(gated.eval().cost("flops"))
    assert state["history"]["columns"]["step"][-1] == 30 and state["budget"] == {"flops": 0.5}


def test_watching_changes_nothing(tmp_path: Path) -> None:
    ends = []
    for live in (None, tmp_path / "run"):
        gated = small()
        tgfx.fit(gated, BATCHES, F.cross_entropy, budget={"flops": 0.5}, steps=12, progress=False, seed=3, live=live)
        ends.append({name: tensor.clone() for name, tensor in gated.state_dict().items()})
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    bad = [(torch.full((4, 3, 6, 6), float("nan")), torch.zeros(4, dtype=torch.int64))]
    with pytest.raises(TrainingError):
        tgfx.fit(small(), bad, F.cross_entropy, budget={"flops": 0.5}, steps=5, progress=False, live=tmp_path)
    assert json.loads((tmp_path / "live.json").read_text())["state"] == "failed"


def test_states_are_not_written_too_often(tmp_path: Path) -> None:
    live = Live(tmp_path, small(), History(["stem", "stages.0.0.conv1"]), total=100)
    live.update(1)
    first = (tmp_path / "live.json").read_text()
    live.update(2)
    assert (tmp_path / "live.json").read_text() == first
    live.update(3, "finished")
    assert json.loads((tmp_path / "live.json").read_text())["now"]["step"] == 3
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="not a folder"):
        Live(tmp_path / "file", small(), History([]), total=1)


def test_only_this_machine_and_only_two_files(
    server: tuple[LiveServer, Live, tgfx.GatedModule, History], tmp_path: Path
) -> None:
    running, live, _, _ = server
    (tmp_path / "secret.txt").write_text("secret")
    assert running.server_address[0] == "127.0.0.1"
    assert ask(running, "/")[0] == ask(running, "/index.html")[0] == 200
    assert ask(running, "/live.json")[0] == 204  # before the first step
    live.update(1)
    status, body = ask(running, "/live.json?x=1")
    assert status == 200 and json.loads(body)["now"]["step"] == 1
    for path in ("/secret.txt", "/../secret.txt", "//etc/passwd", "/%2e%2e/secret.txt"):
        assert ask(running, path) == (404, b"")
    assert ask(running, "/", host="evil.example:80")[0] == 403
    assert ask(running, "/", host=f"localhost:{running.server_port}")[0] == 200
    assert ask(running, "/", method="POST")[0] == 501
    with pytest.raises(InputError, match="nothing to view"):
        LiveServer(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="cannot be used"):
        LiveServer(tmp_path, running.server_port)


@needs_browser
def test_an_open_page_watches_gates_close(server: tuple[LiveServer, Live, tgfx.GatedModule, History]) -> None:
    running, live, gated, history = server
    with chromium() as driver:
        open_page(driver, running.url)
        assert "Waiting" in driver.find_element("id", "badge").text
        gated.gates["stem"].set_open_(torch.arange(8) < 3)
        history.add({"step": 1, "loss": 2.0, "ratio_flops": 0.4}, (3, 8))
        live.update(1)
        wait_for(driver, "tgfxView.data.now.step === 1", "the first step")
        assert "step 1 of 10" in driver.find_element("id", "badge").text
        assert "8×6×6 → 3×6×6" in driver.find_element("css selector", '.box[data-place="n1"]').text
        gated.gates["stem"].set_open_(torch.arange(8) < 2)
        history.add({"step": 2, "loss": 1.0, "ratio_flops": 0.3}, (2, 8))
        live.update(2, "finished")
        wait_for(driver, "tgfxView.data.now.step === 2", "the second step")
        assert "Finished" in driver.find_element("id", "badge").text
        assert "8×6×6 → 2×6×6" in driver.find_element("css selector", '.box[data-place="n1"]').text
        driver.find_element("id", "tab-training").click()
        assert len(driver.find_elements("css selector", "#panel .curve")) == 4
        assert complaints(driver) == []
