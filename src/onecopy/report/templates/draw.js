"use strict";
// Draw: small helpers that make elements, ticks and words for numbers.

const SVG = document.querySelector("svg").namespaceURI; // taken from the page, which so names no address

function svg(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function html(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function swatch(color) {
  return html("i", { class: "swatch", style: `background: ${color}` });
}

// Round values between low and high, about as many as asked for.
function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step + 0); // no -0
  return found;
}

const BYTES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const TIMES = [[1e6, "s"], [1e3, "ms"], [1, "µs"]]; // of microseconds

// A function that writes values up to `largest` in one unit.
function inUnits(units, largest) {
  const [factor, unit] = units.find(([size]) => largest >= size) ?? units.at(-1);
  return (value) => `${plain(value / factor)} ${unit}`;
}

function plain(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= 1e9)) return value.toExponential(1).replace("e+", "e");
  if (size < 1) return value.toLocaleString("en", { maximumSignificantDigits: 3 });
  return value.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 0 : size >= 10 ? 1 : 2 });
}

const bytes = (value) => inUnits(BYTES, value)(value);
const duration = (value) => inUnits(TIMES, value)(value);

// The last place whose key is at most `value`; -1 if there is none. Keys rise.
function placeBefore(list, value, key) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(list[middle]) <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function nearest(list, value, key) {
  const before = placeBefore(list, value, key);
  if (before < 0) return 0;
  if (before + 1 === list.length) return before;
  return value - key(list[before]) <= key(list[before + 1]) - value ? before : before + 1;
}
