"use strict";
// shared by both pages: unpacking, elements, numbers, colours, maps, axis ticks
const byId = (id) => document.getElementById(id);
const unpack = async (text) => {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

const SVG = "http://www.w3.org/2000/svg";
const draw = (tag, attributes, parent, text) => {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
};
const make = (tag, parent, text, className) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  if (parent) parent.appendChild(node);
  return node;
};

const show = (x, digits = 4) => {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  if (x === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return x.toExponential(digits - 1).replace(/\.?0*e\+?/, "e");
  return String(Number(x.toPrecision(digits)));
};

// quantiles come from bins; the first bin reaches to 0, so a quantile in it is only known to be below its edge
const showQuantile = (x, least, most) => x !== null && least !== null && x < least && most > 0 ? `< ${show(least, 2)}` : show(x, 3);

// a perceptually even ramp from dark blue to yellow
const RAMP = [[31, 31, 78], [45, 66, 120], [38, 103, 138], [39, 138, 141], [67, 171, 126], [139, 199, 96], [219, 216, 87], [250, 235, 160]];
const LIGHT = 0.7;  // from here on marks are dark
const colour = (t) => {
  if (t === null || Number.isNaN(t)) return "rgb(128 128 128 / 0.25)";
  const at = Math.min(Math.max(t, 0), 1) * (RAMP.length - 1);
  const low = Math.floor(at), high = Math.min(low + 1, RAMP.length - 1), part = at - low;
  return `rgb(${RAMP[low].map((c, i) => Math.round(c + (RAMP[high][i] - c) * part)).join(" ")})`;
};

// a statistic's colour range: fractions from 0 to 1 (or more: gains of sparse normalisers), others from the smallest to the
// largest value, logarithmic if wide
const FRACTIONS = new Set(["entropy_ratio", "max_weight", "first_key_mass", "gain_ratio"]);
const rangeOf = (statistic, all) => {
  if (FRACTIONS.has(statistic)) return { low: 0, high: all.reduce((most, x) => Math.max(most, x ?? 0), 1), log: false };
  let low = Infinity, high = -Infinity;
  for (const x of all) if (x !== null && x !== undefined) { low = Math.min(low, x); high = Math.max(high, x); }
  return { low, high, log: low > 0 && high / low > 50 };
};
const place = (x, range) => {
  if (x === null || x === undefined) return null;
  if (range.high === range.low) return 0.5;
  const [a, b, v] = range.log ? [range.low, range.high, x].map(Math.log) : [range.low, range.high, x];
  return (v - a) / (b - a);
};
const ruler = (parent, range, paint) => {
  parent.replaceChildren();
  make("span", parent, show(range.low));
  const canvas = make("canvas", parent);
  canvas.width = 128;
  canvas.height = 1;
  const brush = canvas.getContext("2d");
  for (let x = 0; x < 128; x++) { brush.fillStyle = paint(x / 127); brush.fillRect(x, 0, 1, 1); }
  make("span", parent, `${show(range.high)}${range.log ? " (log)" : ""}`);
};

// a layer × head map: cells to click, or to reach with the arrow keys; returns its svg and its cells by row and head
const buildMap = ({ parent, label, layers, widths, size, high, left, top }, state, choose) => {
  const width = left + Math.max(...widths) * size + 4, height = top + layers.length * high + 4, every = Math.ceil(12 / high);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "application", tabindex: "0",
    "aria-label": `${label}; arrow keys choose a head` }, parent);
  const cells = layers.map((layer, row) => {
    const y = top + row * high;
    if (row % every === 0) draw("text", { x: left - 6, y: y + high / 2 + 4, "text-anchor": "end" }, svg, layer.index);
    return Array.from({ length: widths[row] }, (_, head) => {
      const cell = draw("rect", { x: left + head * size + 1, y: y + 1, width: size - 1, height: high - 1, rx: high / 12, class: "cell",
        "data-layer": layer.index, "data-head": head }, svg);
      draw("title", {}, cell);
      cell.addEventListener("click", () => choose({ layer: row, head }));
      return cell;
    });
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const row = Math.min(Math.max(state.layer + step[0], 0), widths.length - 1);
    choose({ layer: row, head: Math.min(Math.max(state.head + step[1], 0), widths[row] - 1) });
  });
  return { svg, cells };
};
// heads by row of the map and by number
const arrange = (layers, heads) => {
  const rowOf = new Map(layers.map((layer, row) => [layer.index, row]));
  const table = layers.map(() => []);
  for (const head of heads) table[rowOf.get(head.layer)][head.head] = head;
  return table;
};

// ticks for an axis of bins at round values: powers of ten first, then 5 and 2, then round steps
const ticks = (edges, left, width, apart) => {
  const many = edges.length - 1, low = edges[0], high = edges[many], chosen = [];
  const at = (x) => {
    let i = 0;
    while (i < many - 1 && edges[i + 1] < x) i++;
    return left + width * (i + (x - edges[i]) / (edges[i + 1] - edges[i])) / many;
  };
  const offer = (value) => {
    const x = Number(value.toPrecision(3)), place = at(x);
    if (x >= low && x <= high && chosen.every((mark) => Math.abs(mark.place - place) >= apart)) chosen.push({ x, place });
  };
  const top = Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) || 1));
  const least = Math.floor(Math.log10(Math.min(...edges.map(Math.abs).filter((x) => x > 0))));
  offer(0);
  for (const digit of [1, 5, 2]) {
    for (let power = top; power >= least; power--) { offer(digit * 10 ** power); offer(-digit * 10 ** power); }
  }
  const step = 10 ** Math.floor(Math.log10(high - low));
  for (const part of [1, 0.5, 0.2, 0.1]) {
    for (let x = Math.ceil(low / (part * step)) * part * step; x <= high; x += part * step) offer(x);
  }
  return chosen;
};

const enableCopy = () => byId("copy")?.addEventListener("click", async (event) => {
  const button = event.currentTarget;
  try { await navigator.clipboard.writeText(button.dataset.copy); button.textContent = "Copied"; } catch { getSelection().selectAllChildren(byId("command")); button.textContent = "Selected"; }
});

// permalinks: #layer-3-head-5 opens that head, as its title does; a word's link opens the glossary
const followLinks = (go) => {
  const follow = () => {
    const [, layer, head] = location.hash.match(/^#layer-(\d+)-head-(\d+)$/) ?? [];
    if (layer !== undefined) go(Number(layer), Number(head));
    if (!location.hash.startsWith("#word-")) return;
    document.querySelector("#glossary details").open = true;
    byId(location.hash.slice(1))?.scrollIntoView({ block: "center" });
  };
  addEventListener("hashchange", follow);
  document.addEventListener("click", (event) => { if (event.target.closest?.("a.word")) document.querySelector("#glossary details").open = true; });
  follow();
};
