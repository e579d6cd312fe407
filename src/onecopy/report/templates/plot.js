// Plot: a frame with axes, and a cursor that the pointer or the arrow keys move. What is inside is the caller's.

// Arguments, in one object:
//   height, left: of the frame and of the margin that holds the names of rows
//   x, y: the ranges shown; without y there is no vertical axis
//   xWords, yWords: numbers to text
//   name: what a reader who cannot see it is told
//   stops: where arrow keys take the cursor, rising
//   draw(area, X, Y): adds the content; X and Y map values to pixels
//   tip(x, y): {at, title, rows: [[color, label, value]]} for a place, or null
//   zoom(from, to): called when a range was dragged, or with nothing for a double click
function plot(host, given) {
  const width = Math.max(200, host.clientWidth);
  const { height, x, y } = given;
  const margin = { left: given.left ?? 64, right: 12, top: 8, bottom: 24 };
  const inner = { width: width - margin.left - margin.right, height: height - margin.top - margin.bottom };
  const X = (value) => margin.left + ((value - x[0]) / (x[1] - x[0])) * inner.width;
  const Y = y && ((value) => margin.top + (1 - (value - y[0]) / (y[1] - y[0])) * inner.height);
  const back = (pixel) => x[0] + ((pixel - margin.left) / inner.width) * (x[1] - x[0]);
  const root = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": given.name });
  const bottom = margin.top + inner.height;

  for (const value of y ? ticks(y[0], y[1], inner.height / 45) : []) {
    root.append(svg("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: Y(value), y2: Y(value) }));
    root.append(svg("text", { x: margin.left - 8, y: Y(value) + 4, "text-anchor": "end" }, given.yWords(value)));
  }
  for (const value of ticks(x[0], x[1], inner.width / 90)) {
    if (!y) root.append(svg("line", { class: "grid", x1: X(value), x2: X(value), y1: margin.top, y2: bottom }));
    const words = given.xWords(value);
    const center = Math.min(X(value), width - words.length * 3.7); // the last one stays inside
    root.append(svg("text", { x: center, y: height - 6, "text-anchor": "middle" }, words));
  }
  root.append(svg("line", { class: "base", x1: margin.left, x2: width - margin.right, y1: bottom, y2: bottom }));

  const clip = `${host.id}-clip`;
  const shape = svg("clipPath", { id: clip });
  shape.append(svg("rect", { x: margin.left, y: 0, width: inner.width, height: bottom + 1 }));
  const area = svg("g", { "clip-path": `url(#${clip})`, class: "area" });
  root.append(shape, area);
  given.draw(area, X, Y, root);

  const cursor = svg("line", { class: "cursor", y1: margin.top, y2: bottom, visibility: "hidden" });
  const tip = html("div", { class: "tip", role: "status" });
  root.append(cursor);
  host.replaceChildren(root, tip);

  let place = null;
  function show(value, vertical) {
    const found = value === null ? null : given.tip(value, vertical);
    place = found && found.at;
    cursor.setAttribute("visibility", found ? "visible" : "hidden");
    tip.replaceChildren();
    if (!found) return;
    const pixel = X(found.at);
    cursor.setAttribute("x1", pixel);
    cursor.setAttribute("x2", pixel);
    tip.append(html("b", {}, found.title));
    for (const [color, label, text] of found.rows) {
      tip.append(html("div", {}, swatch(color), html("span", {}, label), html("span", {}, text)));
    }
    const onRight = pixel > width / 2;
    tip.style.left = onRight ? "auto" : `${pixel + 10}px`;
    tip.style.right = onRight ? `${width - pixel + 10}px` : "auto";
  }

  const inside = (pixel) => Math.min(Math.max(pixel, margin.left), width - margin.right);
  const local = (event) => event.clientX - root.getBoundingClientRect().left;
  let dragged = null;
  root.addEventListener("pointermove", (event) => {
    const pixel = local(event);
    if (dragged) {
      const from = Math.min(dragged.from, inside(pixel));
      dragged.mark.setAttribute("x", from);
      dragged.mark.setAttribute("width", Math.max(dragged.from, inside(pixel)) - from);
    }
    show(pixel < margin.left - 4 ? null : back(inside(pixel)), event.clientY - root.getBoundingClientRect().top);
  });
  root.addEventListener("pointerleave", () => show(null));
  root.addEventListener("blur", () => show(null));
  root.addEventListener("keydown", (event) => {
    const forward = { ArrowRight: true, ArrowLeft: false }[event.key];
    const stops = given.stops.filter((stop) => stop >= x[0] && stop <= x[1]);
    if (forward === undefined || !stops.length) return;
    event.preventDefault();
    const next = place === null ? stops[0]
      : forward ? stops.find((stop) => stop > place) ?? place
      : stops.findLast((stop) => stop < place) ?? place;
    show(next);
  });
  if (!given.zoom) return;
  root.addEventListener("dblclick", () => given.zoom());
  root.addEventListener("pointerdown", (event) => {
    // A finger scrolls the page.
    if (event.pointerType !== "mouse" || event.button) return;
    event.preventDefault();
    const mark = svg("rect", { class: "range", y: margin.top, height: inner.height });
    dragged = { from: inside(local(event)), mark };
    root.append(mark);
    root.setPointerCapture(event.pointerId);
  });
  root.addEventListener("pointerup", (event) => {
    if (!dragged) return;
    const { from, mark } = dragged;
    const to = inside(local(event));
    dragged = null;
    mark.remove();
    if (Math.abs(to - from) > 4) given.zoom(back(Math.min(from, to)), back(Math.max(from, to)));
  });
}
