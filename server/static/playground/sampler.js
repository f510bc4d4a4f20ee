// The arithmetic of the server's sampler (server/engine/sampling/sampler.py), for the page's own bars.

/**
 * Return the probability with which each token is drawn after temperature, top-k, top-p and min-p,
 * given its logit, or its log-probability.
 */
export function drawProbabilities(logits, { temperature, top_k: k, top_p: p, min_p: minP }) {
  const peak = Math.max(...logits);
  if (temperature === 0) return logits.map((_, i) => Number(i === logits.indexOf(peak)));
  const weights = logits.map((logit) => Math.exp((logit - peak) / temperature)); // at most 1
  const sorted = weights.toSorted((one, other) => other - one);
  let floor = k > 0 && k < sorted.length ? sorted[k - 1] : 0; // lighter tokens are dropped
  const candidates = sorted.filter((weight) => weight >= floor);
  if (p < 1) floor = nucleusFloor(candidates, p);
  floor = Math.max(floor, minP);
  const kept = weights.map((weight) => (weight >= floor ? weight : 0));
  const total = sumOf(kept);
  return kept.map((weight) => weight / total);
}

const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);

/** Return the smallest of the fewest weights, likeliest first, whose mass reaches p of the whole. */
function nucleusFloor(sorted, p) {
  const target = p * sumOf(sorted);
  let mass = 0;
  return sorted.find((weight) => (mass += weight) >= target) ?? sorted.at(-1);
}
