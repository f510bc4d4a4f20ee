// The figures of the live view, computed from successive snapshots of /metrics.

import { growth, Metrics, quantile } from "./prometheus.js";

export const SHOWN_SECONDS = 120;
const WINDOW_SECONDS = 30; // window of percentiles, shares and counts
const RATE_SECONDS = 5; // window of rates
const LATENCIES = {
  ttft: "kvasir_time_to_first_token_seconds",
  itl: "kvasir_inter_token_latency_seconds",
};
const QUANTILES = { p50: 0.5, p90: 0.9, p99: 0.99 };
const STARTED = "process_start_time_seconds";

/** Points { at, running, waiting, … } of the last two minutes. A figure without data is null. */
export class Figures {
  points = [];
  #model;
  #snapshots = []; // { at, metrics } of the last window, oldest first

  /** model: the one whose figures are computed; without it, all of a server together. */
  constructor(model) {
    this.#model = model;
  }

  /** Add a snapshot of /metrics, taken `at` a time in seconds. */
  add(text, at) {
    const metrics = new Metrics(text, this.#model);
    const last = this.#snapshots.at(-1);
    const hasRestarted = last && last.metrics.total(STARTED) !== metrics.total(STARTED);
    if (hasRestarted) this.#snapshots = [];
    this.#snapshots.push({ at, metrics });
    this.#snapshots = this.#snapshots.filter((one) => at - one.at <= WINDOW_SECONDS);
    this.points = this.points.filter((one) => at - one.at <= SHOWN_SECONDS);
    this.points.push(this.#point());
  }

  /** Requests rejected since the server started: { reason: count }. */
  get rejected() {
    const samples = this.#snapshots.at(-1).metrics.samples("kvasir_requests_rejected_total");
    const counts = {};
    for (const { labels, value } of samples)
      counts[labels.reason] = (counts[labels.reason] ?? 0) + value; // without a model, and of it
    return counts;
  }

  /** Return the figures of the last snapshot. Those of a window need an earlier one in it. */
  #point() {
    const last = this.#snapshots.at(-1);
    const { at, metrics } = last;
    const [first, recent] = [WINDOW_SECONDS, RATE_SECONDS].map((seconds) =>
      this.#snapshots.find((one) => at - one.at <= seconds),
    );
    const grown = (name, since = first) =>
      since === last ? null : metrics.total(name) - since.metrics.total(name);
    const rate = (name) => (recent === last ? null : grown(name, recent) / (at - recent.at));
    const queried = grown("kvasir_prefix_cache_queries_total");
    const point = {
      at,
      running: metrics.total("kvasir_num_requests_running"),
      waiting: metrics.total("kvasir_num_requests_waiting"),
      kv: metrics.total("kvasir_kv_cache_usage_ratio"),
      output: rate("kvasir_generation_tokens_total"),
      prompt: rate("kvasir_prompt_tokens_total"),
      hits: queried ? grown("kvasir_prefix_cache_hits_total") / queried : null,
      rejected: grown("kvasir_requests_rejected_total"),
    };
    for (const [key, name] of Object.entries(LATENCIES)) {
      const buckets = growth(first.metrics.buckets(name), metrics.buckets(name));
      for (const [suffix, q] of Object.entries(QUANTILES))
        point[`${key}-${suffix}`] = quantile(q, buckets);
    }
    return point;
  }
}
