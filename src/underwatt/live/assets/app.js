// Asks once a second what changed in the run, and sends a new budget.

import { PowerChart, SmallChart } from "./chart.js";
import { bannerOf, showFacts } from "./facts.js";
import { budget, clock } from "./format.js";

const RECENT_S = 300;
const ENTRIES = 200;
const ASK_MS = 1000;
const ASK_AGAIN_MS = 2000; // after no answer
const LONGEST_MS = 10000;
const at = (id) => document.getElementById(id);
const chart = new PowerChart(at("chart"), at("readout"));
const small = Object.fromEntries(["score", "speed", "clock", "temperature"].map((name) => [name,
  new SmallChart(at(`${name}-chart`))]));
const state = {
  scores: [],
  course: [],
  number: 0, // of the update that is shown
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

function take(content) {
  const { number, everything, facts, width_s } = content;
  const wider = everything || width_s !== state.whole.width_s;
  const recent = joined(everything ? [] : state.recent, content.recent);
  const newest = recent.at(-1)?.[0] ?? 0;
  Object.assign(state, {
    number,
    facts,
    recent: recent.filter((row) => row[0] > newest - RECENT_S),
    whole: { width_s, rows: joined(wider ? [] : state.whole.rows, content.whole) },
    scores: added(state.scores, content.scores),
    course: added(state.course, content.course),
  });
  addEntries(content.entries, everything);
  render();
}

const added = (rows, news) => (news.whole ? news.rows : rows.concat(news.rows));

function addEntries(entries, everything) {
  const list = at("entries");
  if (everything) list.replaceChildren();
  const newest = Number(list.firstElementChild?.dataset.number ?? 0);
  for (const entry of entries.filter((one) => one.number > newest)) {
    // Of scores that follow each other the newest stands for all.
    if (entry.kind === "score" && list.firstElementChild?.dataset.kind === "score") list.firstElementChild.remove();
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
  showCourse(chart.span);
}

// What goes on beside the watts, over the same time.
function showCourse([begin, until]) {
  const { scores, course, facts } = state;
  const end = Math.max(until, facts.at_s);
  at("clock-title").textContent = facts.clock ?? "Clock";
  small.score.show(scores.map(([when, value]) => [when, value]), begin, end, { aim: facts.target ?? null });
  small.speed.show(course.map((row) => [row[0], row[1]]), begin, end, { zero: true });
  small.clock.show(course.map((row) => [row[0], row[2]]), begin, end);
  small.temperature.show(course.map((row) => [row[0], row[3]]), begin, end);
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

let next = 0;

async function ask() {
  let wait_ms = ASK_MS;
  try {
    const answer = await fetch(`/state?since=${state.number}`, { signal: AbortSignal.timeout(LONGEST_MS) });
    if (!answer.ok) throw new Error(answer.statusText);
    const back = !state.connected;
    state.connected = true;
    if (answer.status === 200) take(await answer.json());
    else if (back) showBanner();
  } catch {
    state.connected = false;
    showBanner();
    wait_ms = ASK_AGAIN_MS;
  }
  clearTimeout(next); // one that became visible meanwhile asks already
  if (!document.hidden) next = setTimeout(ask, wait_ms);
}

// A page that nobody looks at costs the board nothing; it catches up when it is looked at again.
document.addEventListener("visibilitychange", () => {
  clearTimeout(next);
  if (!document.hidden) ask();
});
at("budget-form").addEventListener("submit", send);
at("show-recent").addEventListener("click", () => choose("recent"));
at("show-whole").addEventListener("click", () => choose("whole"));
if (!document.hidden) ask();
