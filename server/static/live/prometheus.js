// Prometheus' text format, version 0.0.4: a parser, and functions of two snapshots.

const SAMPLE = /^([a-zA-Z_:][\w:]*)[ \t]*(?:\{(.*)\})?[ \t]*([^\s{}]+)(?:[ \t]+-?\d+)?$/;
const LABEL = /[ \t]*([a-zA-Z_]\w*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)/g;
const ESCAPES = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };
const SPECIAL = { "+inf": Infinity, inf: Infinity, "-inf": -Infinity, nan: NaN };

/**
 * All samples of one snapshot, by name, but those of other models than `model`, if it is given.
 * Throws an Error for an invalid line.
 */
export class Metrics {
  #samples;

  constructor(text, model) {
    const lines = text.split("\n").map((line) => line.trim());
    const samples = lines.filter((line) => line && !line.startsWith("#")).map(readSample);
    const isOwn = ({ labels }) => !model || !labels.model || labels.model === model;
    this.#samples = Map.groupBy(samples.filter(isOwn), ({ name }) => name);
  }

  /** Return [{ labels, value }] of a name; [] for an unknown name. */
  samples(name) {
    return this.#samples.get(name) ?? [];
  }

  /** Return the sum over all labels; 0 for a counter that has no samples yet. */
  total(name) {
    return this.samples(name).reduce((sum, { value }) => sum + value, 0);
  }

  /** Return a histogram's cumulative counts, [[upper bound, count]] with ascending bounds. */
  buckets(name) {
    return this.samples(`${name}_bucket`)
      .map(({ labels, value }) => [readNumber(labels.le), value])
      .sort(([one], [other]) => (one < other ? -1 : 1));
  }
}

/** Return the growth of a histogram's buckets between two snapshots of one process. */
export function growth(before, after) {
  return after.map(([bound, count], index) => [bound, count - (before[index]?.[1] ?? 0)]);
}

/**
 * Return the q-quantile of a histogram's buckets, by linear interpolation within a bucket, as
 * Prometheus' histogram_quantile does for bounds above 0. Beyond the last finite bound it is that
 * bound. null if empty.
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
  const rest = text.replace(LABEL, (_, name, value) => {
    labels[name] = value.replace(/\\[n"\\]/g, (escape) => ESCAPES[escape]);
    return "";
  });
  if (rest) throw new Error(`invalid labels in a sample: ${line}`);
  return labels;
}

function readNumber(text) {
  const special = SPECIAL[text.toLowerCase()];
  if (special !== undefined) return special;
  const value = Number(text);
  if (Number.isNaN(value)) throw new Error(`not a number: ${text}`);
  return value;
}
