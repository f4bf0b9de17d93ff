"use strict";
// The eight normalisers of regard on one row of logits, and what the page says about a row. tests/lab/test_explorer_export.py
// compares every function with the library.

const sum = (row) => row.reduce((a, b) => a + b, 0);

function softmax(row, rest = 0) {
  const top = Math.max(...row);
  const powers = row.map((s) => Math.exp(s - top));
  const total = sum(powers) + rest * Math.exp(-top);
  return powers.map((e) => e / total);
}

function ratio(numerators, denominators) {
  const total = sum(denominators);
  return numerators.map((u) => (total > 0 ? u / total : 0));
}

function softpick(row) {
  const above = row.map((s) => Math.max(Math.expm1(s), 0));
  return ratio(above, row.map((s) => Math.abs(Math.expm1(s))));
}

// max((α − 1)·s − τ, 0)^(1/(α − 1)) with Σ = 1: τ by bisection, which needs no derivative.
function entmax(row, alpha) {
  const x = row.map((s) => (alpha - 1) * s);
  const power = 1 / (alpha - 1);
  const weigh = (tau) => x.map((t) => Math.max(t - tau, 0) ** power);
  let high = Math.max(...x);
  let low = high - 1;
  for (let i = 0; i < 60; i++) {
    const middle = (low + high) / 2;
    if (sum(weigh(middle)) >= 1) low = middle;
    else high = middle;
  }
  const weights = weigh(low);
  const total = sum(weights);
  return weights.map((w) => w / total);
}

const NORMALIZERS = {
  softmax: (row) => softmax(row),
  softmax1: (row) => softmax(row, 1),
  sigmoid: (row) => row.map((s) => 1 / (1 + Math.exp(-s))),
  relu: (row) => ratio(row.map((s) => Math.max(s, 0)), row.map((s) => Math.max(s, 0))),
  softpick,
  "entmax(alpha=1.25)": (row) => entmax(row, 1.25),
  entmax15: (row) => entmax(row, 1.5),
  sparsemax: (row) => entmax(row, 2),
};

// ∂p_i/∂s_j by central differences: the page draws it, and no ninth formula can be wrong.
function jacobian(row, name) {
  const step = 1e-4;
  const columns = row.map((_, j) => {
    const moved = (sign) => NORMALIZERS[name](row.map((s, i) => (i === j ? s + sign * step : s)));
    const [up, down] = [moved(1), moved(-1)];
    return up.map((p, i) => (p - down[i]) / (2 * step));
  });
  return row.map((_, i) => columns.map((column) => column[i]));
}

function measure(row, name) {
  const weights = NORMALIZERS[name](row);
  const mass = sum(weights);
  const shares = weights.filter((p) => p > 0).map((p) => p / mass);
  const entropy = Math.abs(sum(shares.map((p) => -p * Math.log(p))));
  const mean = sum(row) / row.length;
  return {
    weights,
    entropy,
    effective_keys: mass > 0 ? Math.exp(entropy) : 0,
    max_weight: Math.max(...weights),
    support: shares.length,
    mass,
    logit_variance: sum(row.map((s) => (s - mean) ** 2)) / row.length,
    gradient_gain: sum(jacobian(row, name).map((line, i) => line[i])),
  };
}

// The weights of the visible keys of a row; the others have 0.
function weighVisible(row, visible, name) {
  const weights = NORMALIZERS[name](row.filter((_, j) => visible[j]));
  return row.map((_, j) => (visible[j] ? weights.shift() : 0));
}

const MASKS = {
  none: () => true,
  causal: (i, j) => j <= i,
  "window of 4": (i, j) => j <= i && i - j < 4,
  padding: (i, j) => j < 8,
};

// Online softmax: the maximum, the sum of exp(s − maximum) and its logarithm after the first blocks of a row.
function runOnline(row, size, blocks) {
  let [max, total] = [-Infinity, 0];
  for (let start = 0; start < Math.min(blocks * size, row.length); start += size) {
    const block = row.slice(start, start + size);
    const larger = Math.max(max, ...block);
    total = total * Math.exp(max - larger) + sum(block.map((s) => Math.exp(s - larger)));
    max = larger;
  }
  return { online_max: max, online_sum: total, online_logsumexp: max + Math.log(total) };
}

// A row as a Boltzmann distribution of the energies −s: F = U − T·S, heat capacity C = Var(E)/T².
function runMechanics(row, temperature) {
  const weights = softmax(row.map((s) => s / temperature));
  const energy = -sum(weights.map((w, i) => w * row[i]));
  const entropy = sum(weights.map((w) => (w > 0 ? -w * Math.log(w) : 0)));
  const variance = sum(weights.map((w, i) => w * (row[i] + energy) ** 2));
  return { free_energy: energy - temperature * entropy, energy, entropy, heat_capacity: variance / temperature ** 2 };
}
