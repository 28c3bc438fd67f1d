// Writes the run's figures into the page. Only text is ever written: nothing from the log becomes markup.

import { budget, count, duration, energy, figure, known, watts } from "./format.js";

const at = (id) => document.getElementById(id);

function put(id, text) {
  const element = at(id);
  if (element.textContent !== text) element.textContent = text;
}

const WARNED_S = 60;
const STATES = {
  searching: "searching for the best setting",
  holding: "holding the budget",
  correcting: "correcting",
  restoring: "putting the device back",
};

export function showFacts(facts) {
  showWho(facts);
  showPower(facts);
  showSetting(facts);
  showProgress(facts);
  showTotals(facts);
}

function showWho(facts) {
  if (facts.job) {
    put("job", facts.job);
    put("device", `on ${facts.device}`);
    document.title = `${watts(facts.power_w)} W · ${facts.job} · Underwatt`;
  }
  at("simulated").hidden = !facts.simulated;
  const ended = { ended: "ended", gone: "gone", waiting: "waiting" }[facts.phase];
  put("state", ended ?? STATES[facts.state] ?? facts.state ?? "running");
  at("state").dataset.state = ended ?? facts.state ?? "";
}

function showPower(facts) {
  put("power-w", watts(facts.power_w));
  put("budget-w", `${budget(facts.budget_w)} ${facts.budget_means ?? ""}`.trim());
  const share = known(facts.budget_w) && known(facts.power_w) ? facts.power_w / facts.budget_w : null;
  const over = share !== null && share > 1.02;
  at("power").classList.toggle("over", over);
  at("headroom-bar").style.width = `${100 * Math.min(1, share ?? 0)}%`;
  if (share === null) put("headroom", "");
  else put("headroom", `${Math.round(100 * share)}% used, ${watts(Math.abs(facts.budget_w - facts.power_w))} W ` +
    (share > 1 ? "above it" : "to spare"));
}

function showSetting(facts) {
  if (!facts.setting) return;
  const knobs = [{ name: "Batch size", value: facts.setting.batch_size, unit: "" }, ...facts.setting.knobs];
  if (facts.gap_share > 0.0005) knobs.push({ name: "Idle between steps", value: Math.round(1000 * facts.gap_share) / 10, unit: "%" });
  const rows = knobs.map((knob) => {
    const [row, name, value] = ["div", "dt", "dd"].map((kind) => document.createElement(kind));
    name.textContent = knob.name;
    value.textContent = `${figure(knob.value, 6)} ${knob.unit}`.trim();
    row.append(name, value);
    return row;
  });
  at("knobs").replaceChildren(...rows);
  put("why", facts.why ? `Why: ${facts.why}` : "");
}

function showProgress(facts) {
  const left = facts.time_left_s;
  const byTime = known(left) ? facts.at_s / Math.max(1e-9, facts.at_s + left) : null;
  const reached = facts.phase === "ended" && facts.end?.outcome === "reached";
  const share = reached ? 1 : known(facts.share) ? Math.min(1, facts.share) : byTime;
  const over = facts.phase === "ended" || facts.phase === "gone";
  put("left", over ? "Ended" : known(left) ? duration(left) : "Not known");
  at("progress-bar").style.width = `${100 * (share ?? 0)}%`;
  const done = share === null || over ? "" : `, ${Math.floor(100 * share)}% done`;
  put("progress", `${duration(facts.at_s)} so far${facts.simulated ? " (simulated)" : ""}${done}`);
  if (known(facts.score) || known(facts.target)) {
    put("score-title", "Score");
    put("score", figure(facts.score));
    put("score-more", [known(facts.target) ? `target ${figure(facts.target)}` : "",
      known(facts.loss) ? `loss ${figure(facts.loss, 3)}` : ""].filter(Boolean).join(", "));
  } else {
    put("score-title", "Loss");
    put("score", figure(facts.loss, 3));
    put("score-more", "no target was set");
  }
}

function showTotals(facts) {
  put("energy", energy(facts.energy_j));
  put("energy-more", known(facts.energy_j) && !energy(facts.energy_j).endsWith(" J") ? `${count(facts.energy_j)} J` : "");
  put("speed", known(facts.samples_s) ? count(facts.samples_s) : "–");
  put("speed-more", known(facts.step_s)
    ? `pauses counted; ${figure(1000 * facts.step_s, 3)} ms a step, ${count(facts.samples)} so far` : "");
  const verdict = facts.verdict;
  put("over", duration(verdict ? verdict.over_s : facts.over_s));
  at("over").classList.toggle("bad", verdict ? verdict.held === false : facts.at_s > 0 && facts.over_s / facts.at_s > 0.01);
  const share = facts.at_s > 0 ? (100 * facts.over_s) / facts.at_s : 0;
  put("over-more", verdict ? verdict.words : `${figure(share, 2)}% of the run; whole seconds whose mean is over 2% above, a sensor’s lag after a ` +
    "change included. The report leaves that out.");
}

// A warning stays for a minute, and for as long as no step is trained.
function isWarned(facts) {
  if (!facts.warning) return false;
  return facts.at_s - facts.warning.at_s < WARNED_S || !known(facts.step_s);
}

// What stands above everything: a warning, how the run ended, or why the page may not be up to date.
export function bannerOf(facts, connected) {
  if (!connected) return ["bad", "The connection to the page’s server is lost; trying again. The run is not affected."];
  if (facts.log_error) return ["bad", facts.log_error];
  if (facts.phase === "ended") {
    const { outcome, words, restored, error } = facts.end;
    const back = restored ? "The device is as it was before." : "The device was not put back: run underwatt restore.";
    const good = ["reached", "finished"].includes(outcome) && restored && facts.verdict?.held !== false;
    const kept = facts.verdict ? `${facts.verdict.words} ` : "";
    return [good ? "good" : "bad", `${kept}${words}. ${error ? `${error} ` : ""}${back}`];
  }
  if (facts.phase === "gone") {
    return ["bad", "The run’s process is gone and did not say how it ended. underwatt restore puts the device back; " +
      "the run goes on with --resume."];
  }
  if (facts.phase === "waiting") return ["", "Waiting for the run to begin."];
  if (facts.read_share < 1) return ["", `Reading the history of the run: ${Math.round(100 * facts.read_share)}%.`];
  if (isWarned(facts)) return ["bad", facts.warning.text];
  if (facts.quiet_s > 10) return ["bad", `Nothing new from the run for ${duration(facts.quiet_s)}.`];
  return null;
}
