"use strict";
// The controls of page.html and what they draw. Random numbers come from a seed, so that a slider changes one thing only.

const ROWS = 64;
const WIDTHS = [1, 2, 4, 8, 16, 32, 64, 128, 256];
const TEMPERATURES = [0.1, 0.2, 0.5, 1, 2, 5, 10];
const SCALES = { "1/√d_k": (d) => d ** -0.5, none: () => 1, "1/d_k": (d) => 1 / d };
const NUMBERS = {
  entropy: "entropy, nats",
  effective_keys: "effective keys",
  max_weight: "largest weight",
  support: "weights above 0",
  mass: "sum of weights",
  logit_variance: "variance of the logits",
  gradient_gain: "gradient gain",
};
const find = (id) => document.getElementById(id);

function makeNormal(seed) {
  let state = seed >>> 0;
  const uniform = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  return () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
}

// ROWS rows of logits: q·k of unit-normal vectors of width d, scaled and divided by the temperature.
function drawRows(width, keys, factor, seed) {
  const normal = makeNormal(seed);
  const vector = () => Array.from({ length: width }, normal);
  const allKeys = Array.from({ length: keys }, vector);
  return Array.from({ length: ROWS }, () => {
    const q = vector();
    return allKeys.map((k) => factor * sum(k.map((x, i) => x * q[i])));
  });
}

function read() {
  const width = WIDTHS[+find("width").value];
  const temperature = TEMPERATURES[+find("temperature").value];
  const setting = { width, temperature, keys: +find("keys").value, scale: find("scale").value };
  return { ...setting, name: find("normalizer").value, seed: +find("seed").value };
}

function rowsAt(setting, width) {
  return drawRows(width, setting.keys, SCALES[setting.scale](width) / setting.temperature, setting.seed);
}

function mean(rows, name, key) {
  return sum(rows.map((row) => measure(row, name)[key])) / rows.length;
}

function bars(values, label) {
  const [w, h, left] = [300, 150, 30];
  const top = Math.max(1e-9, ...values);
  const step = (w - left) / values.length;
  const parts = values.map((v, i) => {
    const height = (h - 25) * (v / top);
    return `<rect x="${left + i * step + 1}" y="${h - 15 - height}" width="${Math.max(step - 2, 1)}" height="${height}"/>`;
  });
  const axis = `<text x="0" y="14">${top.toPrecision(2)}</text><text x="0" y="${h - 15}">0</text>`;
  return `<svg viewBox="0 0 ${w} ${h}" role="img" aria-label="${label}">${axis}${parts.join("")}</svg>`;
}

function histogram(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const counts = Array(24).fill(0);
  for (const v of values) counts[Math.min(23, Math.floor((24 * (v - low)) / (high - low || 1)))] += 1;
  return bars(counts, `scores from ${low.toPrecision(3)} to ${high.toPrecision(3)}`);
}

function list(id, numbers, words = {}) {
  find(id).innerHTML = Object.entries(numbers).map(([key, value]) => {
    const name = words[key] || key.replaceAll("_", " ");
    return `<div><dt>${name}</dt><dd data-number="${key}">${value.toPrecision(4)}</dd></div>`;
  }).join("");
}

function heat(matrix, label) {
  const size = 150 / matrix.length;
  const top = Math.max(1e-12, ...matrix.flat().map(Math.abs));
  const cells = matrix.flatMap((line, i) =>
    line.map((v, j) => {
      const colour = v >= 0 ? "var(--up)" : "var(--down)";
      const place = `x="${j * size}" y="${i * size}" width="${size}" height="${size}"`;
      return `<rect ${place} style="fill:${colour};fill-opacity:${(Math.abs(v) / top).toFixed(3)}"/>`;
    }));
  return `<svg viewBox="0 0 150 150" role="img" aria-label="${label}">${cells.join("")}</svg>`;
}

function curve(xs, ys, marked, label) {
  const [w, h] = [300, 150];
  const top = Math.max(1e-9, ...ys);
  const x = (i) => 35 + (i * (w - 50)) / (xs.length - 1);
  const y = (v) => h - 25 - (h - 40) * (v / top);
  const points = ys.map((v, i) => `${x(i)},${y(v)}`).join(" ");
  const names = xs.map((v, i) => `<text x="${x(i) - 6}" y="${h - 5}">${v}</text>`).join("");
  const dots = ys.map((v, i) => `<circle cx="${x(i)}" cy="${y(v)}" r="${i === marked ? 5 : 2.5}"/>`).join("");
  const axis = `<text x="0" y="18">${top.toPrecision(2)}</text><text x="0" y="${h - 22}">0</text>`;
  return `<svg viewBox="0 0 ${w} ${h}" role="img" aria-label="${label}">${axis}${names}
    <polyline points="${points}"/>${dots}</svg>`;
}

function draw() {
  const setting = read();
  find("width-value").textContent = setting.width;
  find("keys-value").textContent = setting.keys;
  find("temperature-value").textContent = setting.temperature;
  const rows = rowsAt(setting, setting.width);
  const all = rows.map((row) => measure(row, setting.name));
  const means = Object.keys(NUMBERS).map((key) => [key, sum(all.map((one) => one[key])) / all.length]);
  list("numbers", Object.fromEntries(means), NUMBERS);
  find("scores").innerHTML = histogram(rows.flat());
  const first = all[0].weights;
  find("weights").innerHTML = bars(first, `weights of one query; the largest is ${Math.max(...first).toFixed(3)}`);
  find("jacobian").innerHTML = heat(jacobian(rows[0], setting.name), "Jacobian of one row");
  const gains = WIDTHS.map((width) => mean(rowsAt(setting, width).slice(0, 16), setting.name, "gradient_gain"));
  find("gains").innerHTML = curve(WIDTHS, gains, WIDTHS.indexOf(setting.width), "gradient gain against d_k");
  drawOnline(rows[0]);
  drawMasked(setting);
  drawMechanics(rows[0].map((s) => s * setting.temperature), setting.temperature);
}

function drawOnline(row) {
  const block = +find("block").value;
  const steps = (find("seen").max = Math.ceil(row.length / block));
  const seen = Math.min(+find("seen").value, steps);
  find("block-value").textContent = block;
  find("seen-value").textContent = `${seen} of ${steps}`;
  const whole = runOnline(row, row.length, 1).online_logsumexp;
  list("online", { ...runOnline(row, block, seen), whole_logsumexp: whole });
}

function drawMasked(setting) {
  const square = drawRows(setting.width, 12, SCALES[setting.scale](setting.width) / setting.temperature, setting.seed);
  const shown = MASKS[find("mask").value];
  const weights = square.slice(0, 12).map((row, i) =>
    weighVisible(row, row.map((_, j) => shown(i, j)), setting.name));
  const zeros = weights.flat().filter((w) => w === 0).length;
  find("masked").innerHTML = heat(weights, `weights of 12 queries; ${zeros} of 144 are exactly 0`);
}

function drawMechanics(row, temperature) {
  const { heat_capacity: _, ...now } = runMechanics(row, temperature);
  list("mechanics", now);
  const all = TEMPERATURES.map((t) => runMechanics(row, t));
  const at = TEMPERATURES.indexOf(temperature);
  find("entropies").innerHTML = curve(TEMPERATURES, all.map((one) => one.entropy), at, "entropy against temperature");
  const capacities = all.map((one) => one.heat_capacity);
  find("capacities").innerHTML = curve(TEMPERATURES, capacities, at, "heat capacity against temperature");
}

find("normalizer").innerHTML = Object.keys(NORMALIZERS).map((name) => `<option>${name}</option>`).join("");
find("scale").innerHTML = Object.keys(SCALES).map((name) => `<option>${name}</option>`).join("");
find("mask").innerHTML = Object.keys(MASKS).map((name) => `<option>${name}</option>`).join("");
for (const control of document.querySelectorAll("input, select")) control.addEventListener("input", draw);
draw();
