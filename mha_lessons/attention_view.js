// Draws attention weights: a grid of heads on a canvas, the chosen weight in words, the tokens as two strips.
// One plain ES module for anywidget. The traits are described in attention_view.py.

const STOPS = (
  "440154 481a6c 472f7d 414487 39568c 31688e 2a788e 23888e 1f988b 22a884 35b779 54c568 7ad151 a5db36 d2e21b fde725"
).split(" "); // viridis: even steps of lightness, safe for colour-blind readers
const HEIGHT = 400; // of the canvas, at most
const STEP = 50; // of its height
const MAX_CELL = 96;
const GAP = 14; // between heads
const EDGE = 5; // room for a ring around the outermost cells
const TITLE = 20; // above a head
const BAR = 90; // the colour bar at the right, with its numbers
const MAX_LABEL = 110; // a longer token is cut with "…" at the axes; the text line has it whole
// The traits that show() replaces.
const DATA = ["_shape", "_weights", "_hidden", "query_tokens", "key_tokens", "head_names"];
const STYLE = `
.mha-view { color: var(--jp-ui-font-color1, inherit); font-family: var(--jp-ui-font-family, sans-serif);
  font-size: 14px; line-height: 1.45; padding: 4px; contain: inline-size; }
.mha-view canvas { display: block; width: 100%; border-radius: 3px; cursor: crosshair; outline: none; }
.mha-view canvas:focus { box-shadow: 0 0 0 2px var(--jp-brand-color1, #1976d2); }
.mha-line { font-size: 15px; font-weight: 600; margin: 8px 0 4px; min-height: 1.45em; }
.mha-strip { display: flex; margin: 3px 0; align-items: baseline; }
.mha-strip > span { flex: none; width: 5em; }
.mha-strip > div { display: flex; flex-wrap: wrap; gap: 3px; max-height: 84px; overflow: auto; padding: 2px; }
.mha-strip button { font: inherit; line-height: 20px; padding: 1px 6px; min-width: 22px; min-height: 22px;
  border: 1px solid var(--jp-border-color1, #bbb); border-radius: 3px; background: transparent; color: inherit;
  cursor: pointer; white-space: pre; }
.mha-strip button[aria-pressed=true] { outline: 2px solid var(--jp-brand-color1, #1976d2); }
.mha-hint { font-size: 12px; color: var(--jp-ui-font-color1, inherit); opacity: .8; margin-top: 6px; }
.mha-error { border: 2px solid #c62828; padding: 8px; white-space: pre-wrap; }
.mha-error:empty { display: none; }`;

// ---------------------------------------------------------------- colours

const RGB = STOPS.map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
const MAP = Array.from({ length: 256 }, (_, n) => {
  const place = (n / 255) * (RGB.length - 1);
  const low = Math.min(Math.floor(place), RGB.length - 2);
  return RGB[low].map((from, c) => Math.round(from + (RGB[low + 1][c] - from) * (place - low)));
});

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
// A square root: on a linear scale one large weight would leave all others black, on a logarithm 0 has no place.
const onScale = (weight, top) => Math.sqrt(clamp(weight / top, 0, 1));
const colour = (weight, top) => MAP[Math.round(onScale(weight, top) * 255)];
const css = ([r, g, b]) => `rgb(${r}, ${g}, ${b})`;

// Relative luminance as WCAG defines it; above .179 black text has the better contrast, below it white text.
function luminance(rgb) {
  const [r, g, b] = rgb.map((c) => (c <= 10 ? c / 3295 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
const inkOn = (rgb) => (luminance(rgb) > 0.179 ? "#000" : "#fff");

function readTheme(root) {
  const style = getComputedStyle(root);
  const ink = style.color;
  const dark = luminance(ink.match(/[\d.]+/g).slice(0, 3).map(Number)) > 0.4;
  return {
    ink,
    brand: style.getPropertyValue("--jp-brand-color1").trim() || "#1976d2",
    hiddenPaper: dark ? "#3d3d3d" : "#f1f1f1",
    hiddenLine: dark ? "#757575" : "#a3a3a3",
    font: (size, weight = "normal") => `${weight} ${size}px ${style.fontFamily}`,
  };
}

// ---------------------------------------------------------------- data

function readData(model) {
  const [frames, heads, rows, cols] = model.get("_shape");
  const bytes = model.get("_weights");
  // Sliced, because a message may hold the bytes at an offset that Float32Array refuses.
  const weights = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
  const hidden = model.get("_hidden");
  let top = 0;
  for (const weight of weights) if (weight > top) top = weight;
  return {
    frames, heads, rows, cols, weights,
    top: roundUp(top),
    masked: hidden.byteLength > 0,
    hidden: (place) => hidden.byteLength > 0 && hidden.getUint8(place) === 1,
    queries: model.get("query_tokens").map(visible),
    keys: model.get("key_tokens").map(visible),
    names: model.get("head_names"),
  };
}

// Characters that would show as nothing, as the symbols that stand for them.
function visible(token) {
  const text = token.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return text.trim() ? text : text.replaceAll(" ", "␣");
}

// The next round number, so that the scale stays put while the weights move a little.
function roundUp(top) {
  if (top <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(top));
  const steps = [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10];
  return Number((unit * steps.find((step) => step >= (top / unit) * 0.999)).toPrecision(2));
}

// Clamped here too: a linked slider may move with no kernel behind it.
function readChoice(model, data) {
  const at = (name, size) => clamp(model.get(name), 0, size - 1);
  const [frame, head, query, key] = [
    at("frame", data.frames), at("head", data.heads), at("query", data.rows), at("key", data.cols),
  ];
  const place = (head * data.rows + query) * data.cols + key;
  const weight = data.weights[frame * data.heads * data.rows * data.cols + place];
  return { frame, head, query, key, weight, hidden: data.hidden(place), enlarged: model.get("enlarged") };
}

function sentence(data, choice) {
  const { head, query, key, weight, hidden } = choice;
  const start = `${data.names[head]} · query "${data.queries[query]}"`;
  if (hidden) return `${start} cannot see key "${data.keys[key]}": hidden`;
  const number = weight > 0 && weight < 0.0005 ? "less than 0.001" : weight.toFixed(3);
  return `${start} looks at key "${data.keys[key]}": ${number}`;
}

// All heads of one frame in one small image, a pixel a cell, stacked; hidden cells stay transparent.
function paintCells(image, data, frame) {
  const { heads, rows, cols, weights, top } = data;
  const count = heads * rows * cols;
  image.width = cols;
  image.height = heads * rows;
  const pixels = new ImageData(cols, heads * rows);
  for (let place = 0; place < count; place++) {
    if (data.hidden(place)) continue;
    pixels.data.set(colour(weights[frame * count + place], top), 4 * place);
    pixels.data[4 * place + 3] = 255;
  }
  image.getContext("2d").putImageData(pixels, 0, 0);
}

// ---------------------------------------------------------------- layout

// The number of heads across that gives the largest cells.
function arrange(count, data, width, left, bottom) {
  let best = { cell: -1 };
  for (let across = 1; across <= count; across++) {
    const down = Math.ceil(count / across);
    const wide = (width - left - (across - 1) * GAP) / across / data.cols;
    const high = (HEIGHT - bottom - down * TITLE - (down - 1) * GAP) / down / data.rows;
    const cell = Math.min(wide, high, MAX_CELL);
    if (cell > best.cell + 1e-6) best = { across, down, cell };
  }
  return best;
}

// Words at the axes take room from the cells: level where they fit, else slanted, else upright.
function withLabels(count, data, width, words) {
  for (const slope of [0, 45, 90]) {
    const reach = slope === 45 ? words.keys * 0.71 + 8 : slope === 90 ? words.keys : 14;
    const left = 18 + Math.max(words.queries + 8, slope === 45 ? words.keys * 0.71 - 4 : 0);
    const bottom = 8 + reach + 18;
    const fit = { ...arrange(count, data, width, left, bottom), slope, left, bottom };
    const clear = count % fit.across === 0; // else a slanted word would lean over the head beside a missing one
    if (slope === 90 || (slope === 45 && fit.cell >= 17 && clear)) return fit;
    if (slope === 0 && (words.short || words.keys + 6 <= fit.cell)) return fit;
  }
}

function placePanel(heads, data, x, width, words, labels, ratio) {
  const bare = { ...arrange(heads.length, data, width, EDGE, EDGE), left: EDGE, bottom: EDGE, slope: null };
  let fit = labels === "never" ? bare : withLabels(heads.length, data, width, words);
  const legible = fit.cell >= 10 || (words.short && fit.cell * Math.min(data.rows, data.cols) >= 80);
  if (labels === "if room" && !(legible && fit.cell >= 0.7 * bare.cell)) fit = bare;
  // Whole device pixels keep all cells equal, unless rounding down would cost an eighth of the room.
  const whole = Math.floor(fit.cell * ratio) / ratio;
  const cell = whole >= 0.875 * fit.cell ? whole : fit.cell;
  const [wide, high] = [cell * data.cols, cell * data.rows];
  const boxes = heads.map((head, n) => ({
    head,
    x: Math.round((x + fit.left + (n % fit.across) * (wide + GAP)) * ratio) / ratio,
    y: Math.round((TITLE + Math.floor(n / fit.across) * (high + GAP + TITLE)) * ratio) / ratio,
    first: n % fit.across === 0,
    last: n + fit.across >= heads.length,
  }));
  const right = x + fit.left + Math.min(fit.across, heads.length) * (wide + GAP) - GAP;
  const down = fit.down * (high + TITLE + GAP) - GAP;
  const font = cell >= 10 ? clamp(Math.floor(cell), 10, 12) : 12; // thinned where the cells are smaller
  return { ...fit, boxes, cell, wide, high, x, right, font, height: down + fit.bottom, gridBottom: down };
}

// All heads alike, and one head large with the others small beside it. The canvas grows in steps, so that a slider
// that changes the shape a little leaves what stands below it in place.
function placeAll(data, head, width, words, ratio) {
  const all = Array.from({ length: data.heads }, (_, n) => n);
  const room = Math.max(width - BAR, 120);
  const place = (heads, x, wide, labels) => placePanel(heads, data, x, wide, words, labels, ratio);
  const grid = place(all, 0, room, "if room");
  const large = place([head], 0, data.heads > 1 ? room * 0.66 : room, "always");
  const panels = [large];
  const x = large.right + 3 * GAP;
  if (data.heads > 1 && room - x > 100) {
    panels.push(place(all, x, room - x, "never"));
    panels[1].thumbs = true;
  }
  const alike = data.heads > 1 ? [grid] : panels;
  const most = (chosen, side) => Math.max(...chosen.map((panel) => panel[side]));
  const tall = (chosen) => Math.min(Math.ceil(most(chosen, "height") / STEP) * STEP, HEIGHT);
  const finish = (chosen) => ({ panels: chosen, right: most(chosen, "right"), height: tall(chosen) });
  return { alike: finish(alike), enlarged: finish(panels) };
}

function measureWords(context, theme, data) {
  context.font = theme.font(12, "bold");
  const shorten = (token) => {
    const fits = (text) => context.measureText(text).width <= MAX_LABEL;
    let end = token.length;
    while (end > 0 && !fits(token.slice(0, end) + "…")) end -= 1;
    return fits(token) ? token : token.slice(0, end) + "…";
  };
  const widest = (labels) => Math.max(...labels.map((label) => context.measureText(label).width));
  const labels = { query: data.queries.map(shorten), key: data.keys.map(shorten) };
  const [queries, keys] = [widest(labels.query), widest(labels.key)];
  return { labels, queries, keys, short: keys <= 22 }; // short labels, such as numbers, are thinned, not turned
}

// ---------------------------------------------------------------- drawing

// Black around white shows on every colour; the ring lies outside the cells, so that their own colour stays.
function ring(context, left, top, wide, high, thick) {
  const out = thick / 2 + 1;
  const [x, y, width, height] = [left - out, top - out, wide + 2 * out, high + 2 * out];
  for (const [line, ink] of [[thick + 2, "#000"], [thick, "#fff"]]) {
    context.lineWidth = line;
    context.strokeStyle = ink;
    context.strokeRect(x, y, width, height);
  }
}

function hatch(context, theme, ratio) {
  const size = Math.round(6 * ratio);
  const tile = new OffscreenCanvas(size, size);
  const pen = tile.getContext("2d");
  pen.fillStyle = theme.hiddenPaper;
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = theme.hiddenLine;
  pen.lineWidth = 1.2 * ratio;
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
    pen.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

function drawBox(context, scene, panel, box) {
  const { data, choice, theme, image, ratio } = scene;
  const chosen = box.head === choice.head;
  context.font = theme.font(12, chosen ? "bold" : "normal");
  context.fillStyle = chosen ? theme.brand : theme.ink;
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  context.fillText(data.names[box.head], box.x, box.y - 7, panel.wide + GAP - 4);
  if (data.masked) {
    context.fillStyle = scene.pattern;
    context.fillRect(box.x, box.y, panel.wide, panel.high);
  }
  context.imageSmoothingEnabled = panel.cell * ratio < 1; // fewer pixels than cells: average, do not drop
  context.drawImage(image, 0, box.head * data.rows, data.cols, data.rows, box.x, box.y, panel.wide, panel.high);
  if (panel.cell >= 36) drawNumbers(context, scene, panel, box);
}

function drawNumbers(context, scene, panel, box) {
  const { data, choice, theme } = scene;
  context.font = theme.font(clamp(Math.round(panel.cell * 0.28), 11, 18));
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let row = 0; row < data.rows; row++) {
    for (let col = 0; col < data.cols; col++) {
      const place = (box.head * data.rows + row) * data.cols + col;
      if (data.hidden(place)) continue;
      const weight = data.weights[choice.frame * data.heads * data.rows * data.cols + place];
      context.fillStyle = inkOn(colour(weight, data.top));
      context.fillText(weight.toFixed(2), box.x + (col + 0.5) * panel.cell, box.y + (row + 0.5) * panel.cell);
    }
  }
}

function drawChoice(context, { choice }, panel, box) {
  const { cell } = panel;
  const x = box.x + choice.key * cell;
  const y = box.y + choice.query * cell;
  if (box.head === choice.head && !panel.thumbs) {
    ring(context, box.x, y, panel.wide, cell, 1);
    ring(context, x, box.y, cell, panel.high, 1);
  }
  ring(context, x, y, cell, cell, box.head === choice.head && !panel.thumbs ? 2.5 : 1);
}

// Which positions get a label: every one where there is room, else every 2nd, 5th, 10th ... and always the chosen one.
function ticks(count, cell, room, chosen) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => n * cell >= room) ?? count;
  const even = Array.from({ length: count }, (_, n) => n).filter((n) => n % step === 0);
  return [...even.filter((n) => n !== chosen && Math.abs(n - chosen) * cell >= room), chosen];
}

function drawQueryLabels(context, { theme, words, data, choice }, panel, box) {
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const n of ticks(data.rows, panel.cell, panel.font, choice.query)) {
    context.font = theme.font(panel.font, n === choice.query ? "bold" : "normal");
    context.fillStyle = n === choice.query ? theme.brand : theme.ink;
    context.fillText(words.labels.query[n], box.x - 7, box.y + (n + 0.5) * panel.cell + 1);
  }
}

function drawKeyLabels(context, { theme, words, data, choice }, panel, box) {
  const { slope, cell, high } = panel;
  context.textAlign = slope ? "right" : "center";
  context.textBaseline = slope ? "middle" : "top";
  for (const n of ticks(data.cols, cell, slope ? panel.font : words.keys + 6, choice.key)) {
    context.font = theme.font(panel.font, n === choice.key ? "bold" : "normal");
    context.fillStyle = n === choice.key ? theme.brand : theme.ink;
    context.save();
    context.translate(box.x + (n + 0.5) * cell, box.y + high + 7);
    context.rotate((-slope * Math.PI) / 180);
    context.fillText(words.labels.key[n], 0, 0);
    context.restore();
  }
}

function drawAxisNames(context, { theme }, panel) {
  context.font = theme.font(12);
  context.fillStyle = theme.ink;
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  const left = panel.boxes[0].x;
  context.fillText("keys", (left + panel.right) / 2, panel.height - 4);
  context.save();
  context.translate(panel.x + 12, (TITLE + panel.gridBottom) / 2);
  context.rotate(-Math.PI / 2);
  context.fillText("queries", 0, 0);
  context.restore();
}

function drawBar(context, scene, x) {
  const { data, theme, choice, height } = scene;
  const [y, long] = [TITLE + 8, clamp(height - TITLE - 50, 60, 200)];
  const ramp = context.createLinearGradient(0, y + long, 0, y);
  RGB.forEach((rgb, n) => ramp.addColorStop(n / (RGB.length - 1), css(rgb)));
  context.fillStyle = ramp;
  context.fillRect(x, y, 12, long);
  context.font = theme.font(12);
  context.fillStyle = theme.ink;
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  context.fillText("weight", x, y - 15);
  context.textBaseline = "middle";
  for (const part of [0, 0.5, 1]) {
    const value = Number((part ** 2 * data.top).toPrecision(2));
    context.fillText(String(value), x + 24, y + long * (1 - part) + 1);
  }
  if (data.masked) {
    context.fillStyle = scene.pattern;
    context.fillRect(x, y + long + 16, 12, 12);
    context.fillStyle = theme.ink;
    context.fillText("hidden", x + 18, y + long + 23);
  }
  if (choice.hidden) return;
  const mark = y + long * (1 - onScale(choice.weight, data.top)); // the chosen weight's place on the scale
  context.fillStyle = theme.brand;
  context.beginPath();
  context.moveTo(x + 12, mark);
  context.lineTo(x + 20, mark - 5);
  context.lineTo(x + 20, mark + 5);
  context.fill();
}

function drawScene(canvas, scene) {
  const { layout, ratio, width, height } = scene;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  scene.pattern = hatch(context, scene.theme, ratio);
  for (const panel of layout.panels) {
    for (const box of panel.boxes) drawBox(context, scene, panel, box);
    for (const box of panel.boxes) drawChoice(context, scene, panel, box);
    if (panel.slope === null) continue;
    for (const box of panel.boxes) {
      if (box.first) drawQueryLabels(context, scene, panel, box);
      if (box.last) drawKeyLabels(context, scene, panel, box);
    }
    drawAxisNames(context, scene, panel);
  }
  drawBar(context, scene, layout.right + 22);
}

// The head and the cell under a point of the canvas.
function findCell(layout, data, x, y) {
  for (const panel of layout.panels) {
    for (const box of panel.boxes) {
      const [col, row] = [Math.floor((x - box.x) / panel.cell), Math.floor((y - box.y) / panel.cell)];
      if (col < 0 || row < 0 || col >= data.cols || row >= data.rows) continue;
      return panel.thumbs ? { head: box.head, thumb: true } : { head: box.head, query: row, key: col };
    }
  }
  return null;
}

// ---------------------------------------------------------------- the widget

function element(tag, parent, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text; // never innerHTML: a token such as "<b>" is text
  parent.append(made);
  return made;
}

function makeStrip(root, name, pick) {
  const strip = element("div", root, "mha-strip");
  element("span", strip, "", name);
  const list = element("div", strip);
  list.addEventListener("click", (event) => {
    const at = [...list.children].indexOf(event.target);
    if (at >= 0) pick(at);
  });
  return (tokens) => {
    list.replaceChildren();
    for (const token of tokens) {
      const button = element("button", list, "", token);
      button.type = "button";
      button.tabIndex = -1; // the canvas is the one tab stop; its arrow keys reach every token
    }
    return [...list.children];
  };
}

function shadeStrips(scene, buttons) {
  const { data, choice, theme } = scene;
  const row = (choice.head * data.rows + choice.query) * data.cols;
  const frame = choice.frame * data.heads * data.rows * data.cols;
  buttons.query.forEach((button, n) => button.setAttribute("aria-pressed", n === choice.query));
  buttons.key.forEach((button, n) => {
    const rgb = colour(data.weights[frame + row + n], data.top);
    const lines = `repeating-linear-gradient(-45deg, ${theme.hiddenLine} 0 1px, ${theme.hiddenPaper} 1px 5px)`;
    button.setAttribute("aria-pressed", n === choice.key);
    button.style.background = data.hidden(row + n) ? lines : css(rgb);
    button.style.color = data.hidden(row + n) ? "inherit" : inkOn(rgb);
  });
}

function keyMove(key, choice, data) {
  const moves = {
    ArrowUp: { query: choice.query - 1 }, ArrowDown: { query: choice.query + 1 },
    ArrowLeft: { key: choice.key - 1 }, ArrowRight: { key: choice.key + 1 },
    PageUp: { head: choice.head - 1 }, PageDown: { head: choice.head + 1 },
    "[": { head: choice.head - 1 }, "]": { head: choice.head + 1 },
    Enter: { enlarged: !choice.enlarged }, Escape: { enlarged: false },
  };
  const move = moves[key];
  if (!move) return null;
  const last = { query: data.rows - 1, key: data.cols - 1, head: data.heads - 1 };
  for (const name in move) if (name in last) move[name] = clamp(move[name], 0, last[name]);
  return move;
}

// The elements on the page and what is remembered between two drawings.
function makeView(model, el) {
  const root = element("div", el, "mha-view");
  root.setAttribute("data-lm-suppress-shortcuts", "true"); // JupyterLab leaves the arrow keys to us
  element("style", root, "", STYLE);
  const canvas = element("canvas", root);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  const line = element("div", root, "mha-line");
  line.setAttribute("aria-live", "polite");
  const choose = (change) => {
    for (const name in change) model.set(name, change[name]);
    model.save_changes();
  };
  const pick = (name) => (at) => {
    canvas.focus({ preventScroll: true });
    choose({ [name]: at });
  };
  return {
    model, root, canvas, line, choose,
    fillQueries: makeStrip(root, "queries", pick("query")),
    fillKeys: makeStrip(root, "keys", pick("key")),
    hint: element("div", root, "mha-hint"),
    failure: element("div", root, "mha-error"),
    image: document.createElement("canvas"),
    scene: null, // what was drawn last
    stale: true, // the weights or tokens changed since then
    held: false, // a click holds the choice while the mouse moves on
  };
}

function draw(view) {
  const { model, root, canvas, line, image } = view;
  const width = root.clientWidth - 8;
  if (width <= 0) return; // not on the page yet; the observer calls again
  const data = view.stale ? readData(model) : view.scene.data;
  if (view.stale) view.buttons = { query: view.fillQueries(data.queries), key: view.fillKeys(data.keys) };
  const choice = readChoice(model, data);
  if (view.stale || view.scene.choice.frame !== choice.frame) paintCells(image, data, choice.frame);
  const theme = readTheme(root);
  const ratio = window.devicePixelRatio || 1;
  const words = measureWords(image.getContext("2d"), theme, data);
  const layout = placeAll(data, choice.head, width, words, ratio)[choice.enlarged ? "enlarged" : "alike"];
  view.scene = { data, choice, theme, ratio, words, layout, width, height: layout.height, image };
  view.stale = false;
  canvas.style.height = `${layout.height}px`;
  drawScene(canvas, view.scene);
  shadeStrips(view.scene, view.buttons);
  const said = sentence(data, choice);
  if (line.textContent !== said) line.textContent = said; // the same again would be read aloud again
  canvas.setAttribute("aria-label", `Attention weights, ${data.heads} heads. ${said}`);
  const heads = data.heads > 1 ? " · Enter or double click: enlarge a head · Page Up, Page Down: next head" : "";
  view.hint.textContent = `mouse or arrow keys: choose a cell · click: ${view.held ? "let it go" : "hold it"}${heads}`;
  view.failure.textContent = "";
}

// What the mouse and the keyboard do on the canvas. They ask the model for the choice, not the scene, because keys
// may come faster than frames.
function makeHandlers(view, redraw) {
  const { model, canvas, choose } = view;
  const now = () => readChoice(model, view.scene.data);
  const under = (event) => {
    const frame = canvas.getBoundingClientRect();
    return findCell(view.scene.layout, view.scene.data, event.clientX - frame.left, event.clientY - frame.top);
  };
  return {
    pointermove(event) {
      const cell = under(event);
      if (cell && !cell.thumb && !view.held) choose(cell);
    },
    click(event) {
      canvas.focus({ preventScroll: true });
      const cell = under(event);
      if (!cell) return;
      if (cell.thumb) return choose({ head: cell.head });
      const same = ["head", "query", "key"].every((name) => cell[name] === now()[name]);
      view.held = !(view.held && same);
      choose(cell);
      redraw();
    },
    dblclick(event) {
      if (under(event)) choose({ enlarged: !now().enlarged });
    },
    keydown(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const move = keyMove(event.key, now(), view.scene.data);
      if (!move) return;
      event.preventDefault();
      event.stopPropagation();
      choose(move);
    },
  };
}

function render({ model, el }) {
  const view = makeView(model, el);
  const guarded = (work) => (event) => {
    try {
      work(event);
    } catch (error) {
      console.error(error);
      view.failure.textContent = `The attention view could not be drawn: ${error.message}`;
    }
  };
  let waiting = 0;
  const frame = guarded(() => { waiting = 0; draw(view); });
  const redraw = () => { waiting ||= requestAnimationFrame(frame); }; // several changes, one drawing
  const reread = () => { view.stale = true; };

  for (const name of DATA) model.on(`change:${name}`, reread);
  model.on("change", redraw);
  const handlers = makeHandlers(view, redraw);
  for (const name in handlers) {
    view.canvas.addEventListener(name, guarded((event) => view.scene && handlers[name](event)));
  }
  const resize = new ResizeObserver(redraw);
  resize.observe(view.root);
  const themes = new MutationObserver(redraw); // JupyterLab notes a change of theme on the body
  themes.observe(document.body, { attributes: true });
  return () => {
    cancelAnimationFrame(waiting);
    resize.disconnect();
    themes.disconnect();
    for (const name of DATA) model.off(`change:${name}`, reread);
    model.off("change", redraw);
  };
}

export default { render };
