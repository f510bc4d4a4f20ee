// Numbers formatted for people.

const exact = new Intl.NumberFormat("en");
const rough = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const BYTE_UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB"];

/** 1894080 → "1,894,080" */
export const formatCount = (value) => exact.format(value);

/** 1894080 → "1.89M" */
export const formatCompact = (value) => compact.format(value);

/** 1234.5 → "1,230" */
export const formatRough = (value) =>
  (value < 1000 ? rough : exact).format(value < 1000 ? value : Math.round(value));

/** 0.9765625 → "97.7 %", 0.0001 → "< 0.1 %", with no-break spaces */
export const formatShare = (value) =>
  value > 0 && value < 0.001 ? "<\u00a00.1\u00a0%" : `${tenths.format(100 * value)}\u00a0%`;

/** 0.00123 → "1.23 ms" */
export const formatSeconds = (value) =>
  value < 1 ? `${rough.format(value * 1000)} ms` : `${rough.format(value)} s`;

/** 2065152 → "1.97 MiB" */
export function formatBytes(value) {
  const power = value ? Math.min(Math.floor(Math.log2(value) / 10), BYTE_UNITS.length - 1) : 0;
  return `${rough.format(value / 1024 ** power)} ${BYTE_UNITS[power]}`;
}
