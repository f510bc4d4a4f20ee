// What the live view shows, computed from /metrics as it was from moment to moment.

import { growth, Metrics, quantile } from "./prometheus.js";

export const SHOWN_SECONDS = 120;
const WINDOW_SECONDS = 30; // percentiles and shares are of what happened in the last of them
const RATE_SECONDS = 5;
const LATENCIES = {
  ttft: "kvasir_time_to_first_token_seconds",
  itl: "kvasir_inter_token_latency_seconds",
};
const QUANTILES = { p50: 0.5, p90: 0.9, p99: 0.99 };
const STARTED = "process_start_time_seconds";

/** Points {at, running, waiting, …} of the last two minutes; a figure that nothing has happened for is null. */
export class Figures {
  points = [];
  #moments = []; // {at, metrics} of the last window, the oldest first

  /** Take up what /metrics said `at` a moment, in seconds. */
  add(text, at) {
    const metrics = new Metrics(text);
    const last = this.#moments.at(-1);
    if (last && last.metrics.total(STARTED) !== metrics.total(STARTED)) this.#moments = []; // counters began again
    this.#moments.push({ at, metrics });
    this.#moments = this.#moments.filter((one) => at - one.at <= WINDOW_SECONDS);
    this.points = this.points.filter((one) => at - one.at <= SHOWN_SECONDS);
    this.points.push({ at, ...this.#levels(metrics), ...this.#rates(), ...this.#latencies() });
  }

  /** How many requests were rejected since the server started, {reason: count}. */
  get rejected() {
    const samples = this.#moments.at(-1).metrics.samples("kvasir_requests_rejected_total");
    return Object.fromEntries(samples.map(({ labels, value }) => [labels.reason, value]));
  }

  /** Whether the server has had nothing to do since it started. */
  get isUntouched() {
    const { metrics } = this.#moments.at(-1);
    const { running, waiting } = this.points.at(-1);
    const ended =
      metrics.total("kvasir_request_success_total") +
      metrics.total("kvasir_requests_rejected_total");
    return running + waiting + ended === 0;
  }

  #levels(metrics) {
    return {
      running: metrics.total("kvasir_num_requests_running"),
      waiting: metrics.total("kvasir_num_requests_waiting"),
      kv: metrics.total("kvasir_kv_cache_usage_ratio"),
    };
  }

  #rates() {
    const queried = this.#grown("kvasir_prefix_cache_queries_total", WINDOW_SECONDS);
    return {
      output: this.#rate("kvasir_generation_tokens_total"),
      prompt: this.#rate("kvasir_prompt_tokens_total"),
      hits: queried
        ? this.#grown("kvasir_prefix_cache_hits_total", WINDOW_SECONDS) / queried
        : null,
      rejected: this.#grown("kvasir_requests_rejected_total", WINDOW_SECONDS),
    };
  }

  #latencies() {
    const figures = {};
    const [before, after] = this.#ends(WINDOW_SECONDS);
    for (const [key, name] of Object.entries(LATENCIES)) {
      const grown = growth(before.metrics.buckets(name), after.metrics.buckets(name));
      for (const [suffix, q] of Object.entries(QUANTILES))
        figures[`${key}-${suffix}`] = quantile(q, grown);
    }
    return figures;
  }

  /** The first moment that is at most so many seconds old, and the last. */
  #ends(seconds) {
    const last = this.#moments.at(-1);
    return [this.#moments.find((one) => last.at - one.at <= seconds), last];
  }

  #grown(name, seconds) {
    const [before, after] = this.#ends(seconds);
    return before === after ? null : after.metrics.total(name) - before.metrics.total(name);
  }

  #rate(name) {
    const [before, after] = this.#ends(RATE_SECONDS);
    return before === after ? null : this.#grown(name, RATE_SECONDS) / (after.at - before.at);
  }
}
