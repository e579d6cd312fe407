// Page: what the reader has chosen, the controls that change it, and the charts drawn from both.

const data = JSON.parse(document.getElementById("data").textContent);
const chosen = { categories: new Set(), lanes: new Set(), rank: "all", view: null };
const host = (id) => document.getElementById(id);

const traces = () => (chosen.rank === "all" ? data.traces : [data.traces[chosen.rank]]);
const whole = () => [0, traces().reduce((end, trace) => Math.max(end, trace.end), 1)];

function zoom(from, to) {
  // No closer than one microsecond.
  chosen.view = from === undefined ? null : [from, Math.max(to, from + 1)];
  draw();
}

function scaleView(factor) {
  const [from, to] = chosen.view ?? whole(), [low, high] = whole();
  const middle = (from + to) / 2, half = ((to - from) / 2) * factor;
  const next = [Math.max(low, middle - half), Math.min(high, middle + half)];
  if (next[0] === low && next[1] === high) zoom(); else zoom(...next);
}

function drawMemorySteps() {
  const { steps, peak } = data.memory;
  const line = chosen.categories.has("process") ? [] : peak;
  const all = steps.length ? steps : peak;
  if (!all.length) return host("memory-steps").replaceChildren(html("p", { class: "note" }, "Not recorded."));
  drawStack(host("memory-steps"), {
    stacks: steps,
    categories: steps.length ? data.categories : [],
    hidden: chosen.categories,
    x: [all[0][0] - 0.5, all.at(-1)[0] + 0.5],
    end: all.at(-1)[0] + 0.5,
    lead: 0.5,
    xWords: plain,
    name: "Memory over the steps",
    title: (step) => `step ${plain(step)}`,
    line,
    lineName: "whole process",
    events: data.events,
  });
}

// Of the chosen rank; of all ranks, the one with the highest peak.
function drawMemoryStep() {
  const tops = traces().filter(({ memory }) => memory.length).map((trace) => {
    const sums = trace.memory.map(([, sizes]) => sizes.reduce((a, b) => a + b, 0));
    const place = sums.reduce((best, sum, at) => (sum > sums[best] ? at : best), 0);
    return { trace, peak: sums[place], at: trace.memory[place][0] };
  });
  if (!tops.length) return host("memory-step").replaceChildren(html("p", { class: "note" }, "Not recorded on this rank."));
  const { trace, peak, at } = tops.reduce((best, one) => (one.peak > best.peak ? one : best));
  const which = chosen.rank === "all" && data.traces.length > 1 ? `rank ${trace.rank}, the highest` : `rank ${trace.rank}`;
  host("memory-step-title").textContent = `Memory within the step: ${which}, ${bytes(peak)} at ${duration(at)}`;
  drawStack(host("memory-step"), {
    stacks: trace.memory,
    categories: data.categories,
    hidden: chosen.categories,
    x: chosen.view ?? whole(),
    end: trace.end,
    xWords: inUnits(TIMES, whole()[1]),
    name: `Memory within the step, ${which}`,
    title: (time) => `rank ${trace.rank}, ${duration(time)}`,
    mark: at,
    zoom,
  });
}

function drawTraffic() {
  const { sent, after_evaluation, formula } = data.traffic;
  drawCurve(host("traffic-steps"), {
    points: sent, name: "sent", words: bytes, axisWords: (high) => inUnits(BYTES, high), fromZero: true, height: 190,
    also: after_evaluation, dot: ["ring", "sent, with evaluation"],
    dashed: formula ?? undefined, dashedName: "formula", events: data.events,
  });
}

// Over the steps that the other charts have.
function drawLosses() {
  const { events, training } = data;
  const steps = [...events, ...training.loss].map(([step]) => step);
  const [first, last] = [steps.reduce((a, b) => Math.min(a, b)), steps.reduce((a, b) => Math.max(a, b))];
  drawEvents(host("events-steps"), events, first < last ? [first, last] : [first - 0.5, last + 0.5]);
}

function draw() {
  if (host("events-steps")) drawLosses();
  if (host("memory-steps")) drawMemorySteps();
  if (host("traffic-steps")) drawTraffic();
  if (host("timeline")) {
    drawTimeline(host("timeline"), { traces: traces(), lanes: data.lanes, phases: data.phases, hidden: chosen.lanes, x: chosen.view ?? whole(), zoom });
    host("zoom-reset").disabled = host("zoom-out").disabled = chosen.view === null;
  }
  if (host("memory-step")) drawMemoryStep();
  if (host("loss")) {
    const { training, events } = data;
    drawCurve(host("loss"), { points: training.loss, name: "loss", words: plain, also: training.validation, dot: ["dot", "validation loss"], events });
    drawCurve(host("speed"), { points: training.tokens_per_second, name: "tokens per second", words: plain, fromZero: true, events });
    drawCurve(host("gradient-norm"), { points: training.gradient_norm, name: "gradient norm", words: plain, fromZero: true });
    drawCurve(host("learning-rate"), { points: training.learning_rate, name: "learning rate", words: plain, fromZero: true });
  }
}

// Chips switch what is drawn; those of the same kind, wherever they stand, move together.
function addChips(kind, entries) {
  for (const group of document.querySelectorAll(`[data-chips="${kind}"]`)) {
    for (const [key, label, color] of entries) {
      if (key === "process" && !group.closest("#memory")) continue; // known per step only
      const chip = html("button", { type: "button", "data-key": key, "aria-pressed": !chosen[kind].has(key) }, swatch(color), label);
      chip.addEventListener("click", () => {
        if (!chosen[kind].delete(key)) chosen[kind].add(key);
        for (const same of document.querySelectorAll(`[data-chips="${kind}"] [data-key="${key}"]`)) {
          same.setAttribute("aria-pressed", !chosen[kind].has(key));
        }
        draw();
      });
      group.append(chip);
    }
  }
}

for (const button of document.querySelectorAll("[data-theme-choice]")) {
  button.addEventListener("click", () => {
    const choice = button.dataset.themeChoice;
    if (choice === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    for (const other of document.querySelectorAll("[data-theme-choice]")) other.setAttribute("aria-pressed", other === button);
  });
}
host("rank")?.addEventListener("change", (event) => {
  chosen.rank = event.target.value;
  zoom();
});
host("zoom-in")?.addEventListener("click", () => scaleView(0.5));
host("zoom-out")?.addEventListener("click", () => scaleView(2));
host("zoom-reset")?.addEventListener("click", () => zoom());

// Dozens of ranks at once are too many to read.
if (data.traces.length > 8) chosen.rank = host("rank").value = "0";
// Beside its categories the process is a giant on a CPU: it starts hidden.
if (data.memory.steps.length && data.memory.peak.length) chosen.categories.add("process");
addChips("categories", [
  ...data.categories.map(({ key, label }) => [key, label, `var(--c-${key}, var(--c-other))`]),
  ...(chosen.categories.has("process") ? [["process", "whole process", "var(--ink)"]] : []),
]);
addChips("lanes", data.lanes.map((lane) => [lane, lane === "wait" ? "exposed wait" : lane, laneColor(lane, 0)]));
draw();

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  draw();
});
