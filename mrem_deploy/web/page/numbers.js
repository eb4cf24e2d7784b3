// What becomes of a model's outputs: plain arithmetic, without the page.

export function softmax(values) {
  const most = Math.max(...values);
  const powers = values.map((value) => Math.exp(value - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}

export const sigmoid = (value) => 1 / (1 + Math.exp(-value));

const POOLINGS = {
  cls: (column) => column[0],
  lasttoken: (column) => column[column.length - 1],
  max: (column) => column.reduce((most, value) => Math.max(most, value), -Infinity),
  mean: (column) => column.reduce((sum, value) => sum + value, 0) / column.length,
};

// (tokens × width) → one vector of length 1.
export function sentenceVector(hidden, tokens, width, pooling) {
  const pooled = Float64Array.from({ length: width }, (_, i) =>
    POOLINGS[pooling](Array.from({ length: tokens }, (_, token) => hidden[token * width + i])));
  const length = Math.hypot(...pooled) || 1;
  return pooled.map((value) => value / length);
}

export const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
