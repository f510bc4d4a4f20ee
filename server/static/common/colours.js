// Colours of attention weights. Lightness changes evenly with the weight from 0 to 1.

const STEPS = 256;
// At weights 0, 0.5 and 1. Lightness is linear, so equal steps of weight look equal.
const LIGHT = ["oklch(0.975 0.012 85)", "oklch(0.635 0.15 58)", "oklch(0.295 0.075 30)"];
const DARK = ["oklch(0.26 0.014 80)", "oklch(0.605 0.13 58)", "oklch(0.95 0.085 95)"];

/** Return the current theme's colours of base.css, for drawing on a canvas. */
export function themeColours() {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.forcedColorAdjust = "none";
  const resolve = (name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  };
  const names = ["accent", "line", "page", "quiet", "surface", "text"];
  const colours = Object.fromEntries(names.map(resolve));
  probe.remove();
  return colours;
}

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** The colour scale of the current theme. Emphasised, it uses square roots: small weights show. */
export class Palette {
  constructor(emphasised) {
    this.emphasised = emphasised;
    this.most = 1;
    this.bytes = render(isDark() ? DARK : LIGHT);
  }

  /** Return the same scale for numbers of any sign up to `most`, by their size. */
  upTo(most) {
    return Object.assign(Object.create(this), { most });
  }

  /** Write red, green and blue bytes to `target`, beginning at `offset`. */
  paint(weight, target, offset) {
    const at = 4 * this.step(weight);
    for (let i = 0; i < 3; i++) target[offset + i] = this.bytes[at + i];
  }

  step(weight) {
    const size = Math.min(1, Math.abs(weight) / this.most);
    const share = this.emphasised ? Math.sqrt(size) : size;
    return Math.round(share * (STEPS - 1));
  }

  /** Return [background, text colour] of a weight, with a contrast of at least 4.5:1. */
  pair(weight) {
    const rgb = [0, 0, 0];
    this.paint(weight, rgb, 0);
    return [`rgb(${rgb})`, luminance(rgb) > 0.179 ? "#000" : "#fff"];
  }
}

/** Render the scale: the browser converts OKLCH to bytes. */
function render(stops) {
  const canvas = new OffscreenCanvas(STEPS, 1);
  const context = canvas.getContext("2d");
  for (let i = 0; i < STEPS; i++) {
    const place = (2 * i) / (STEPS - 1);
    const from = Math.min(1, Math.floor(place));
    const share = 100 * (place - from);
    context.fillStyle = `color-mix(in oklch, ${stops[from]}, ${stops[from + 1]} ${share}%)`;
    context.fillRect(i, 0, 1, 1);
  }
  return context.getImageData(0, 0, STEPS, 1).data;
}

/** Return the relative luminance (WCAG 2.2) of sRGB bytes. */
function luminance(rgb) {
  const [r, g, b] = rgb.map((byte) =>
    byte / 255 <= 0.04045 ? byte / 3294.6 : ((byte / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
