// Timeline: what each rank did when. A lane is a band of rows; events that overlap lie in different rows.

const ROW = 15, GAP = 4, HEAD = 20;
const WORDS_LIMIT = 300; // names written into bars

function laneColor(lane, phase) {
  return lane === "compute" ? `var(--l-compute-${phase})` : `var(--l-${lane})`;
}

// The longest form of a name that fits a bar: "forward transformer.h.1", "transformer.h.1", "h.1", or none.
function shortened(name, width) {
  const unit = name.split(" ").at(-1);
  return [name, unit, unit.split(".").slice(-2).join(".")].find((form) => form.length * 6.4 + 8 <= width);
}

// Bands from top to bottom: {trace, lane, events, top, rows}. `blocks` are the ranks: {trace, top, bottom}.
function layOut(traces, lanes, hidden) {
  const bands = [], blocks = [];
  let top = 8;
  for (const trace of traces) {
    const block = { trace, top };
    top += HEAD;
    for (const lane of lanes) {
      const events = trace.lanes[lane];
      if (hidden.has(lane)) continue;
      const rows = 1 + events.reduce((most, event) => Math.max(most, event[4]), 0);
      bands.push({ trace, lane, events, top, rows });
      top += rows * ROW + GAP;
    }
    block.bottom = top;
    blocks.push(block);
    top += 8;
  }
  return { bands, blocks, bottom: top };
}

// `given`: traces, lanes, phases, hidden, x, zoom.
function drawTimeline(host, given) {
  const { bands, blocks, bottom } = layOut(given.traces, given.lanes, given.hidden);
  const box = (X, start, length, top, height) => {
    const left = X(start), end = X(start + length);
    const right = end - left > 3 ? end - 1 : Math.max(end, left + 0.8); // neighbours stay apart, the shortest is seen
    return `M${left.toFixed(1)} ${top}H${right.toFixed(1)}V${top + height}H${left.toFixed(1)}Z`;
  };
  const visible = ([start, length]) => start <= given.x[1] && start + length >= given.x[0];
  const waits = (X, trace, top, height) => trace.lanes.wait.filter(visible)
    .map(([start, length]) => box(X, start, length, top, height)).join("");
  plot(host, {
    height: bottom + 24,
    left: 64,
    x: given.x,
    xWords: inUnits(TIMES, given.x[1]),
    name: `Timeline of ${given.traces.length} rank(s) from ${duration(given.x[0])} to ${duration(given.x[1])}; `
      + "the table below has the sums.",
    stops: bands.length ? bands[0].events.map(([start]) => start) : [],
    zoom: given.zoom,
    draw(area, X, Y, root) {
      let words = 0;
      for (const { trace, top, bottom: end } of blocks) {
        root.append(svg("text", { class: "rank-name", x: 0, y: top + 13 }, `rank ${trace.rank}`));
        if (given.hidden.has("wait")) continue;
        area.append(svg("path", { class: "held", d: waits(X, trace, top + HEAD - 2, end - top - HEAD) }));
      }
      for (const { trace, lane, events, top, rows } of bands) {
        root.append(svg("text", { x: 54, y: top + (rows * ROW) / 2 + 4, "text-anchor": "end" }, lane));
        given.phases.forEach((phase, number) => {
          const seen = events.filter((event) => event[3] === number && visible(event));
          if (!seen.length) return;
          const path = svg("path", {
            d: seen.map(([start, length, , , row]) => box(X, start, length, top + row * ROW, ROW - 1)).join(""),
            style: `fill: ${laneColor(lane, number)}`,
            "data-lane": lane,
            "data-rank": trace.rank,
          });
          path.append(svg("title", {}, `${lane}, ${phase}`));
          area.append(path);
        });
        // A unit's computation goes on being drawn while it waits.
        if (lane === "compute" && !given.hidden.has("wait")) {
          area.append(svg("path", { class: "stalled", d: waits(X, trace, top, rows * ROW - 1) }));
        }
        for (const [start, length, name, , row] of events.filter(visible)) {
          const left = Math.max(X(start), 64);
          const text = shortened(trace.names[name], X(start + length) - left);
          if (!text || words >= WORDS_LIMIT) continue;
          area.append(svg("text", { class: "bar-name", x: left + 4, y: top + row * ROW + 11 }, text));
          words += 1;
        }
      }
    },
    tip(x, y) {
      if (!blocks.length) return null;
      const block = blocks.find(({ bottom: end }) => y <= end) ?? blocks[y === undefined ? 0 : blocks.length - 1];
      const rows = [];
      for (const { trace, lane, events } of bands) {
        if (trace !== block.trace) continue;
        for (const [start, length, name, phase, , sent] of events) {
          if (start > x || start + length < x) continue;
          const text = sent ? `${duration(length)}, ${bytes(sent)}` : duration(length);
          const words = trace.names[name];
          const during = words.includes(given.phases[phase]) ? "" : `, ${given.phases[phase]}`;
          rows.push([laneColor(lane, phase), words + during, text]);
        }
      }
      return { at: x, title: `rank ${block.trace.rank}, ${duration(x)}`, rows };
    },
  });
}
