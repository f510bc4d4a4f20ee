// The colours of weights: lightness rises or falls evenly from 0 to 1, in one hue after another.

const STEPS = 256;
// OKLCH at weight 0, a half and 1: lightness is linear, so that equal steps of weight look equal.
const LIGHT = [
  [0.975, 0.012, 85],
  [0.635, 0.15, 58],
  [0.295, 0.075, 30],
];
const DARK = [
  [0.26, 0.014, 80],
  [0.605, 0.13, 58],
  [0.95, 0.085, 95],
];

/** The colours of base.css as the theme has them now, for a canvas. */
export function themeColours() {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.forcedColorAdjust = "none";
  const resolve = (name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  };
  const colours = Object.fromEntries(
    ["accent", "line", "page", "quiet", "surface", "text"].map(resolve),
  );
  probe.remove();
  return colours;
}

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** The colours of weights in the theme that is shown. `lifted`: by the weight's root, so that small ones show. */
export class Palette {
  constructor(lifted) {
    this.lifted = lifted;
    this.bytes = render(isDark() ? DARK : LIGHT);
  }

  /** Red, green and blue at `target[offset]` and on. */
  paint(weight, target, offset) {
    const at = 4 * this.step(weight);
    for (let i = 0; i < 3; i++) target[offset + i] = this.bytes[at + i];
  }

  step(weight) {
    const share = Math.min(1, Math.max(0, this.lifted ? Math.sqrt(weight) : weight));
    return Math.round(share * (STEPS - 1));
  }

  /** For text on this weight's colour: [background, ink], always at least 4.5 to 1. */
  pair(weight) {
    const rgb = [0, 0, 0];
    this.paint(weight, rgb, 0);
    return [`rgb(${rgb})`, luminance(rgb) > 0.179 ? "#000" : "#fff"];
  }
}

/** The browser turns OKLCH into bytes. */
function render(stops) {
  const canvas = new OffscreenCanvas(STEPS, 1);
  const context = canvas.getContext("2d");
  for (let i = 0; i < STEPS; i++) {
    const place = (2 * i) / (STEPS - 1);
    const from = Math.min(1, Math.floor(place));
    const mix = stops[from].map(
      (value, channel) => value + (stops[from + 1][channel] - value) * (place - from),
    );
    context.fillStyle = `oklch(${mix.join(" ")})`;
    context.fillRect(i, 0, 1, 1);
  }
  return context.getImageData(0, 0, STEPS, 1).data;
}

/** Relative luminance (WCAG 2.2) of sRGB bytes. */
function luminance(rgb) {
  const [r, g, b] = rgb.map((byte) =>
    byte / 255 <= 0.04045 ? byte / 3294.6 : ((byte / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
