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
