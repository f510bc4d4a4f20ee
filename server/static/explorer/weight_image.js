// A head as an image with one pixel per weight, from which maps of any size are drawn, and its
// background.

import { isVisible } from "./weights.js";

/** Return an image of n × n pixels. Masked ones are transparent, so the hatching shows through. */
export function weightImage(weights, n, mask, palette) {
  const canvas = new OffscreenCanvas(n, n);
  const context = canvas.getContext("2d");
  const image = context.createImageData(n, n);
  for (let query = 0; query < n; query++) {
    for (let key = 0; key < n; key++) {
      if (!isVisible(query, key, mask)) continue;
      const pixel = query * n + key;
      palette.paint(weights[pixel], image.data, 4 * pixel);
      image.data[4 * pixel + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Return the pattern of masked cells: thin diagonals on the page's background. */
export function hatching(context, { page, line }) {
  const tile = new OffscreenCanvas(8, 8);
  const pen = tile.getContext("2d");
  pen.fillStyle = page;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = line;
  pen.beginPath();
  for (const shift of [-8, 0, 8]) {
    pen.moveTo(shift - 1, 9);
    pen.lineTo(shift + 9, -1);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

/** Size a canvas to the screen's resolution, and return its context, scaled to CSS pixels. */
export function sharpen(canvas, width, height) {
  const ratio = devicePixelRatio;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}
