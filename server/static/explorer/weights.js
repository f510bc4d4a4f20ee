// One head's attention weights: which cells a token may see, and whether the weights keep their promise.

/** How many tokens one sees in this layer, itself among them; null is all before it. */
export function windowOf(config, layer) {
  const everywhere = config.sliding_window_layers === null;
  return everywhere || config.sliding_window_layers.includes(layer) ? config.sliding_window : null;
}

export function isVisible(query, key, window) {
  return key <= query && (window === null || query - key < window);
}

/** Rows as JSON has them, one after another in one array. They were 32-bit numbers before, so nothing is lost. */
export function flatten(rows) {
  const flat = new Float32Array(rows.length ** 2);
  rows.forEach((row, i) => flat.set(row, i * rows.length));
  return flat;
}

/** How far a row's sum is from 1 at most, and the largest weight where nothing may be seen. */
export function check(weights, n, window) {
  let deviation = 0;
  let leak = 0;
  for (let query = 0; query < n; query++) {
    let sum = 0;
    for (let key = 0; key < n; key++) {
      const weight = weights[query * n + key];
      sum += weight;
      if (!isVisible(query, key, window)) leak = Math.max(leak, Math.abs(weight));
    }
    deviation = Math.max(deviation, Math.abs(sum - 1));
  }
  return { deviation, leak };
}

/** 0.4213, or 3.1e-6 where four digits would show nothing. */
export function formatWeight(weight) {
  return weight > 0 && weight < 0.00005 ? weight.toExponential(1) : weight.toFixed(4);
}
