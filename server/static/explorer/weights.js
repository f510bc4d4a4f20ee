// Attention weights of one head: which cells are visible, and whether the weights are valid.

/**
 * Return which tokens a token sees in this layer: if `causal`, none after itself; if `window` is a
 * number, none that is so many or more positions away.
 */
export function maskOf(config, layer) {
  const everywhere = config.sliding_window_layers === null;
  const has = everywhere || config.sliding_window_layers.includes(layer);
  return { causal: config.causal, window: has ? config.sliding_window : null };
}

/** Return whether a query may attend to a key. */
export function isVisible(query, key, { causal, window }) {
  return !(causal && key > query) && (window === null || Math.abs(query - key) < window);
}

/**
 * Flatten rows of JSON numbers into a Float32Array. They were 32-bit floats, so this loses nothing.
 */
export function flatten(rows) {
  const flat = new Float32Array(rows.length ** 2);
  rows.forEach((row, i) => flat.set(row, i * rows.length));
  return flat;
}

/** Return the largest deviation of a row's sum from 1, and the largest weight of a masked cell. */
export function check(weights, n, mask) {
  let deviation = 0;
  let leak = 0;
  for (let query = 0; query < n; query++) {
    let sum = 0;
    for (let key = 0; key < n; key++) {
      const weight = weights[query * n + key];
      sum += weight;
      if (!isVisible(query, key, mask)) leak = Math.max(leak, Math.abs(weight));
    }
    deviation = Math.max(deviation, Math.abs(sum - 1));
  }
  return { deviation, leak };
}

/** 0.42131 → "0.4213", 0.0000031 → "3.1e-6" */
export function formatWeight(weight) {
  return weight > 0 && weight < 0.00005 ? weight.toExponential(1) : weight.toFixed(4);
}
