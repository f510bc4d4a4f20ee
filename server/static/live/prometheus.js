// Prometheus' text format, version 0.0.4: samples read exactly, and what can be derived of two moments of them.

const SAMPLE = /^([a-zA-Z_:][\w:]*)[ \t]*(?:\{(.*)\})?[ \t]*([^\s{}]+)(?:[ \t]+-?\d+)?$/;
const LABEL = /[ \t]*([a-zA-Z_]\w*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)/y;
const ESCAPES = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };
const SPECIAL = { "+inf": Infinity, inf: Infinity, "-inf": -Infinity, nan: NaN };

/** All samples of one moment, by name. Throws for a line that is none. */
export class Metrics {
  #samples = new Map();

  constructor(text) {
    for (const line of text.split("\n").map((one) => one.trim())) {
      if (line === "" || line.startsWith("#")) continue;
      const { name, labels, value } = readSample(line);
      if (!this.#samples.has(name)) this.#samples.set(name, []);
      this.#samples.get(name).push({ labels, value });
    }
  }

  /** [{labels, value}] of a name; none where there is no such name. */
  samples(name) {
    return this.#samples.get(name) ?? [];
  }

  /** The sum over all labels: 0 for a counter that has not counted yet. */
  total(name) {
    return this.samples(name).reduce((sum, { value }) => sum + value, 0);
  }

  /** A histogram's cumulative counts, [[upper bound, count]] with bounds ascending. */
  buckets(name) {
    const pairs = this.samples(`${name}_bucket`).map(({ labels, value }) => [
      readNumber(labels.le),
      value,
    ]);
    return pairs.sort(([one], [other]) => (one < other ? -1 : 1));
  }
}

/** How much a histogram grew: buckets, as of two moments of one process. */
export function growth(before, after) {
  return after.map(([bound, count], index) => [bound, count - (before[index]?.[1] ?? 0)]);
}

/**
 * The q-quantile of a histogram's buckets, by linear interpolation within one, as histogram_quantile computes it for
 * bounds above 0: beyond the last finite bound it is that bound. null for a histogram of nothing.
 */
export function quantile(q, buckets) {
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return null;
  const rank = q * total;
  const index = buckets.findIndex(([, count]) => count >= rank);
  if (buckets[index][0] === Infinity) return buckets[index - 1]?.[0] ?? null;
  const [lower, below] = index ? buckets[index - 1] : [0, 0];
  const [upper, count] = buckets[index];
  return lower + (upper - lower) * ((rank - below) / (count - below));
}

function readSample(line) {
  const found = SAMPLE.exec(line);
  if (found === null) throw new Error(`not a sample of Prometheus' text format: ${line}`);
  const [, name, labels, value] = found;
  return { name, labels: readLabels(labels ?? "", line), value: readNumber(value) };
}

function readLabels(text, line) {
  const labels = {};
  LABEL.lastIndex = 0;
  while (LABEL.lastIndex < text.length) {
    const found = LABEL.exec(text);
    if (found === null) throw new Error(`not the labels of a sample: ${line}`);
    labels[found[1]] = found[2].replace(/\\[n"\\]/g, (escape) => ESCAPES[escape]);
  }
  return labels;
}

function readNumber(text) {
  const special = SPECIAL[text.toLowerCase()];
  if (special !== undefined) return special;
  const value = Number(text);
  if (Number.isNaN(value)) throw new Error(`not a number: ${text}`);
  return value;
}
