// Series: lines and stacked areas over steps or over time.

// "M… L…" through points; a gap where a value is missing.
function linePath(points, X, Y) {
  let path = "", open = false;
  for (const [x, y] of points) {
    if (y !== null) path += `${open ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`;
    open = y !== null;
  }
  return path;
}

function range(points) {
  const [first, last] = [points[0][0], points.at(-1)[0]];
  return first < last ? [first, last] : [first - 0.5, last + 0.5];
}

const present = (points) => points.filter(([, y]) => y !== null);

// What happened to ranks: [step, kind, seconds, words].
const eventColor = (kind) => (kind === "recovery" ? "var(--l-wait)" : "var(--c-activations)");

function markEvents(area, events, X, height) {
  for (const [step, kind, , words] of events) {
    const line = svg("line", { class: "happened", x1: X(step), x2: X(step), y1: 0, y2: height, style: `stroke: ${eventColor(kind)}` });
    line.append(svg("title", {}, words));
    area.append(line);
  }
}

const eventRows = (events, at) => events.filter(([step]) => step === at).map(([, kind, , words]) => [eventColor(kind), words, ""]);

// A mark for each event at its step, as high as it took seconds. `x`: the steps shown.
function drawEvents(host, events, x) {
  const high = events.reduce((most, [, , seconds]) => Math.max(most, seconds), 0) || 1;
  plot(host, {
    height: 150,
    x,
    y: [0, high * 1.15],
    xWords: plain,
    yWords: (value) => `${plain(value)} s`,
    name: `${events.length} events, steps ${events[0][0]} to ${events.at(-1)[0]}, up to ${plain(high)} s; they are in the table below.`,
    stops: [...new Set(events.map(([step]) => step))],
    draw(area, X, Y) {
      for (const [step, kind, seconds, words] of events) {
        const [across, up] = [X(step), Y(seconds)];
        const style = `stroke: ${eventColor(kind)}`;
        area.append(svg("line", { class: "stem", x1: across, x2: across, y1: Y(0), y2: up, style }));
        const mark = kind === "recovery"
          ? svg("path", { d: `M${across} ${up - 6}l6 6l-6 6l-6 -6Z`, style: `fill: ${eventColor(kind)}` })
          : svg("circle", { class: "ring", r: 4, cx: across, cy: up, style });
        mark.dataset.event = kind;
        mark.append(svg("title", {}, words));
        area.append(mark);
      }
    },
    tip(value) {
      const at = events[nearest(events, value, ([step]) => step)][0];
      return { at, title: `step ${plain(at)}`, rows: eventRows(events, at) };
    },
  });
}

// A curve over steps. `given`: points, name, words, fromZero; and where wanted: also (points as dots), dot (their class
// and name), events, dashed (a height, or a list of points), dashedName.
function drawCurve(host, given) {
  const known = present(given.points), also = present(given.also ?? []);
  if (!known.length && !also.length) {
    host.replaceChildren(html("p", { class: "note" }, "Not recorded."));
    return;
  }
  const heights = [...known, ...also].map(([, y]) => y);
  if (typeof given.dashed === "number") heights.push(given.dashed);
  const high = heights.reduce((a, b) => Math.max(a, b)), lowest = heights.reduce((a, b) => Math.min(a, b));
  const low = given.fromZero ? 0 : lowest;
  const spare = (high - low || Math.abs(high) || 1) * 0.06;
  const steps = [...given.points, ...(given.also ?? [])].sort((a, b) => a[0] - b[0]);
  const missing = given.points.length - known.length;
  plot(host, {
    height: given.height ?? 200,
    x: range(steps),
    y: [given.fromZero ? 0 : low - spare, high + spare],
    xWords: plain,
    yWords: given.axisWords ? given.axisWords(high) : plain,
    name: `${given.name}, steps ${steps[0][0]} to ${steps.at(-1)[0]}: from ${given.words(lowest)} to ${given.words(high)}.`
      + (missing ? ` ${missing} values are no finite numbers.` : ""),
    stops: [...new Set(steps.map(([step]) => step))],
    draw(area, X, Y) {
      markEvents(area, given.events ?? [], X, given.height ?? 200);
      area.append(svg("path", { class: "series", d: linePath(given.points, X, Y) }));
      if (typeof given.dashed === "number") {
        area.append(svg("line", { class: "dashed", x1: 0, x2: 1e5, y1: Y(given.dashed), y2: Y(given.dashed) }));
      }
      if (known.length === 1) area.append(svg("circle", { class: "ring", r: 3, cx: X(known[0][0]), cy: Y(known[0][1]) }));
      for (const [step, value] of also) {
        area.append(svg("circle", { class: given.dot[0], r: 4, cx: X(step), cy: Y(value) }));
      }
    },
    tip(x) {
      const at = steps[nearest(steps, x, ([step]) => step)][0];
      const rows = [];
      const value = (points) => points.find(([step]) => step === at)?.[1];
      const line = value(given.points), dot = value(given.also ?? []);
      if (line !== undefined) rows.push(["var(--accent)", given.name, line === null ? "not finite" : given.words(line)]);
      if (dot !== undefined) rows.push([given.dot[0] === "dot" ? "var(--c-activations)" : "var(--accent)", given.dot[1], given.words(dot)]);
      if (typeof given.dashed === "number") rows.push(["var(--ink)", given.dashedName, given.words(given.dashed)]);
      return { at, title: `step ${plain(at)}`, rows: [...rows, ...eventRows(given.events ?? [], at)] };
    },
  });
}

// Stacked areas; a size holds until the next. `given`: stacks ([x, sizes]), categories, hidden, x, end (of the last size),
// xWords, name, title(x); and where wanted: lead (how far before its x a size begins; the cursor then snaps to each x),
// line (points of a dashed line), lineName, mark (an x), events, zoom.
function drawStack(host, given) {
  const shown = given.categories.map((category, place) => ({ ...category, place })).filter(({ key }) => !given.hidden.has(key));
  const { stacks } = given;
  const line = given.line ?? [];
  const total = ([, sizes]) => shown.reduce((sum, { place }) => sum + sizes[place], 0);
  const lead = given.lead ?? 0;
  const visible = stacks.filter(([x], place) => x <= given.x[1] && (stacks[place + 1]?.[0] ?? Infinity) >= given.x[0]);
  const high = Math.max([...visible.map(total), ...present(line).map(([, y]) => y)].reduce((a, b) => Math.max(a, b), 0), 1);
  const color = (key) => `var(--c-${key}, var(--c-other))`;
  plot(host, {
    height: 260,
    x: given.x,
    y: [0, high * 1.06],
    xWords: given.xWords,
    yWords: inUnits(BYTES, high),
    name: `${given.name}: ${shown.map(({ label }) => label).join(", ") || "no category shown"}; up to ${bytes(high)}.`,
    stops: (stacks.length ? stacks : line).map(([x]) => x),
    zoom: given.zoom,
    draw(area, X, Y) {
      let below = stacks.map(() => 0);
      for (const { key, label, place } of shown) {
        const above = below.map((base, at) => base + stacks[at][1][place]);
        const path = svg("path", {
          d: `M${edge(stacks, above, X, Y, given.end, lead)}L${edge(stacks, below, X, Y, given.end, lead, true)}Z`,
          style: `fill: ${color(key)}`,
          "data-category": key,
        });
        path.append(svg("title", {}, label));
        area.append(path);
        below = above;
      }
      if (line.length) area.append(svg("path", { class: "dashed", d: linePath(line.length > 1 ? line : given.x.map((x) => [x, line[0][1]]), X, Y), "data-category": "process" }));
      markEvents(area, given.events ?? [], X, Y(0));
      if (given.mark !== undefined) area.append(svg("line", { class: "peak", x1: X(given.mark), x2: X(given.mark), y1: 0, y2: Y(0) }));
    },
    tip(x) {
      const source = stacks.length ? stacks : line;
      if (!source.length) return null;
      const place = Math.max(0, placeBefore(source, x + lead, ([start]) => start));
      const at = lead ? source[place][0] : x;
      const rows = stacks.length ? shown.map((one) => [color(one.key), one.label, bytes(stacks[place][1][one.place])]).reverse() : [];
      if (shown.length > 1) rows.push(["transparent", "together", bytes(total(stacks[place]))]);
      const outline = line.find(([step]) => step === at);
      if (outline) rows.push(["var(--ink)", given.lineName, bytes(outline[1] ?? 0)]);
      return { at, title: given.title(at), rows: [...rows, ...eventRows(given.events ?? [], at)] };
    },
  });
}

// One edge of an area, a stair: along the tops from left to right, or back along the bottoms.
function edge(stacks, heights, X, Y, end, lead, back = false) {
  const corners = stacks.flatMap(([x], at) => [[x - lead, heights[at]], [stacks[at + 1] ? stacks[at + 1][0] - lead : end, heights[at]]]);
  const points = corners.map(([x, y]) => `${X(x).toFixed(1)} ${Y(y).toFixed(1)}`);
  return (back ? points.reverse() : points).join("L");
}
