// Follows the run by server-sent events, and sends a new budget.

import { PowerChart } from "./chart.js";
import { bannerOf, showFacts } from "./facts.js";
import { budget, clock } from "./format.js";

const RECENT_S = 300;
const ENTRIES = 200;
const at = (id) => document.getElementById(id);
const chart = new PowerChart(at("chart"), at("readout"));
const state = {
  facts: null,
  recent: [],
  whole: { width_s: 1, rows: [] },
  range: "recent",
  connected: true,
  asked: null,
};

// The token is in a cookie by now; it need not stay in the address bar, in screenshots and in the history.
history.replaceState(null, "", "/");

// Rows that came again replace what was there: the last one may still have been growing.
function joined(rows, fresh) {
  if (!fresh.length) return rows;
  const kept = rows.filter((row) => row[0] < fresh[0][0]);
  return kept.concat(fresh);
}

function take(content, whole) {
  state.facts = content.facts;
  const wider = whole || content.whole.width_s !== state.whole.width_s;
  state.recent = joined(whole ? [] : state.recent, content.recent);
  const newest = state.recent.at(-1)?.[0] ?? 0;
  state.recent = state.recent.filter((row) => row[0] > newest - RECENT_S);
  state.whole = {
    width_s: content.whole.width_s,
    rows: joined(wider ? [] : state.whole.rows, content.whole.rows),
  };
  addEntries(content.entries, whole);
  render();
}

function addEntries(entries, whole) {
  const list = at("entries");
  if (whole) list.replaceChildren();
  const newest = Number(list.firstElementChild?.dataset.number ?? 0);
  for (const entry of entries.filter((one) => one.number > newest)) {
    const item = document.createElement("li");
    Object.assign(item.dataset, { number: entry.number, kind: entry.kind, level: entry.level });
    const [when, kind, text] = ["time", "span", "span"].map((name) => document.createElement(name));
    when.textContent = clock(entry.at_s);
    kind.textContent = entry.level === "warning" ? "warning" : entry.kind;
    kind.className = "kind";
    text.textContent = entry.text;
    text.className = "text";
    item.append(when, kind, text);
    list.prepend(item);
  }
  while (list.childElementCount > ENTRIES) list.lastElementChild.remove();
}

function render() {
  if (!state.facts) return;
  showFacts(state.facts);
  showBanner();
  showAsked();
  const recent = state.range === "recent";
  const budget_w = state.facts.budget_w ?? null;
  if (recent) chart.show(state.recent, 1, RECENT_S, budget_w);
  else chart.show(state.whole.rows.length ? state.whole.rows : state.recent, state.whole.width_s, 0, budget_w);
}

function showBanner() {
  const [tone, text] = bannerOf(state.facts ?? {}, state.connected) ?? ["", ""];
  const banner = at("banner");
  banner.hidden = !text;
  banner.dataset.tone = tone;
  if (banner.textContent !== text) {
    banner.textContent = text;
    if (["ended", "gone"].includes(state.facts?.phase) || text === state.facts?.warning?.text) {
      at("announce").textContent = text;
    }
  }
  document.body.classList.toggle("stale", !state.connected);
}

function say(text, tone) {
  const status = at("budget-status");
  if (status.textContent !== text) status.textContent = text;
  status.dataset.tone = tone;
  at("budget").setAttribute("aria-invalid", String(tone === "bad"));
}

// A budget is "asked for" until the log of the run says that it holds.
function showAsked() {
  const { asked, budget_w, at_s, phase } = state.facts;
  const closed = phase === "ended" || phase === "gone";
  at("budget-send").disabled = closed;
  if (closed) {
    if (state.asked) say("The run ended before it took this up.", "bad");
    state.asked = null;
  } else if (asked) {
    const late = at_s - asked.at_s > 10 ? " The run has not taken it up yet; the log may say why." : "";
    say(`Asked for ${asked.budget}, waiting for the run.${late}`, "wait");
    state.asked = asked.budget;
  } else if (state.asked) {
    say(`In force: ${budget(budget_w)}.`, "good");
    state.asked = null;
  }
}

async function send(event) {
  event.preventDefault();
  const text = at("budget").value.trim();
  if (!text) return say("Give the watts, such as 7W.", "bad");
  const typed = /^[0-9.]+$/.test(text) ? `${text}W` : text;
  try {
    const answer = await fetch("/budget", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ budget: typed }),
    });
    if (answer.ok) {
      state.asked = typed;
      say(`Asked for ${typed}, waiting for the run.`, "wait");
      at("budget").value = "";
    } else if (answer.headers.get("Content-Type")?.startsWith("application/json")) {
      const { error, hint } = await answer.json();
      say(`${error} ${hint}`.trim(), "bad");
    } else {
      say((await answer.text()).trim(), "bad");
    }
  } catch {
    say("The page’s server does not answer; nothing was changed.", "bad");
  }
}

function choose(range) {
  state.range = range;
  at("show-recent").setAttribute("aria-pressed", String(range === "recent"));
  at("show-whole").setAttribute("aria-pressed", String(range === "whole"));
  render();
}

let stream = null;
let again = 0;

function disconnect() {
  stream?.close();
  stream = null;
  clearTimeout(again);
}

function connect() {
  disconnect();
  stream = new EventSource("/events");
  stream.addEventListener("snapshot", (event) => {
    state.connected = true;
    take(JSON.parse(event.data), true);
  });
  stream.addEventListener("update", (event) => take(JSON.parse(event.data), false));
  stream.addEventListener("error", () => {
    state.connected = false;
    showBanner();
    // The browser tries again by itself unless the server answered with an error.
    if (stream?.readyState === EventSource.CLOSED) again = setTimeout(connect, 3000);
  });
}

// A page that nobody looks at costs the board nothing; it catches up when it is looked at again.
document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
at("budget-form").addEventListener("submit", send);
at("show-recent").addEventListener("click", () => choose("recent"));
at("show-whole").addEventListener("click", () => choose("whole"));
if (!document.hidden) connect();
