// The live view: a served page asks for live.json again and again, and shows gates as they close.

const live = { state: "waiting", step: null, total: null, failures: 0 };
const EVERY = 1000;

function liveText() {
  if (live.state === "file") return "Opened from disk: the page shows the run as it was. `tgfx view FOLDER` follows it.";
  if (live.state === "lost") return "The server does not answer; the page shows what came last.";
  if (live.state === "waiting") return "Waiting for the first step …";
  const at = live.step === null ? "" : `step ${whole(live.step)}${live.total ? ` of ${whole(live.total)}` : ""}`;
  return live.state === "running" ? `Training: ${at}` : `${live.state === "finished" ? "Finished" : "Stopped"}: ${at}`;
}

function takeLive(fresh) {
  data.now = fresh.now;
  data.history = fresh.history;
  if (fresh.budget) data.budget = fresh.budget;
  Object.assign(live, { state: fresh.state, step: fresh.now.step, total: fresh.total, failures: 0 });
  drawnRegion = null;
  redraw(true);
  drawTabs();
  drawPanel();
  showLive();
}

function showLive() {
  const badge = byId("badge");
  badge.hidden = !data.live;
  badge.textContent = liveText();
  badge.dataset.state = live.state;
}

async function poll() {
  try {
    const answer = await fetch("live.json", { cache: "no-store" });
    if (answer.status === 200) {
      const fresh = await answer.json();
      if (fresh.stamp !== live.stamp) {
        live.stamp = fresh.stamp;
        takeLive(fresh);
      }
    }
    live.failures = 0;
  } catch {
    live.failures += 1;
    if (live.failures === 3 && live.state !== "finished") {
      live.state = "lost";
      showLive();
    }
  }
  setTimeout(poll, document.hidden ? 5 * EVERY : EVERY);
}

function startLive() {
  if (!data.live) return;
  if (!location.protocol.startsWith("http")) live.state = "file";
  else poll();
  showLive();
}
