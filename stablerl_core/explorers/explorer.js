(() => {
  const root = document.currentScript.parentElement;
  const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  const inputs = [...root.querySelectorAll("input")];
  const [left, right, top, bottom] = data.box;

  // The share of the way along an axis; null where a value is missing or, unless held, outside.
  const share = (value, [low, high, log], held) => {
    if (value === null || (log && value <= 0)) return null;
    const s = ((log ? Math.log10(value) : value) - low) / (high - low);
    if (held) return Math.min(1, Math.max(0, s));
    return s < -1e-9 || s > 1 + 1e-9 ? null : s;
  };
  const across = (value, axis) => {
    const s = share(value, axis);
    return s === null ? null : left + s * (right - left);
  };
  const up = (value, axis, held) => {
    const s = share(value, axis, held);
    return s === null ? null : bottom - s * (bottom - top);
  };
  const set = (node, values) => {
    for (const [name, value] of Object.entries(values)) node.setAttribute(name, value.toFixed(1));
  };

  const put = {
    path(node, series, [x, y]) {
      let pen = "M", d = "";
      series[node.dataset.x].forEach((value, i) => {
        const px = across(value, x), py = up(series[node.dataset.y][i], y);
        if (px === null || py === null) { pen = "M"; return; }
        d += `${pen}${px.toFixed(1)} ${py.toFixed(1)}`;
        pen = "L";
      });
      node.setAttribute("d", d);
    },
    circle(node, series, [x, y]) {
      const px = across(series[node.dataset.x][0], x), py = up(series[node.dataset.x][1], y);
      node.style.visibility = px === null || py === null ? "hidden" : "visible";
      if (px !== null && py !== null) set(node, { cx: px, cy: py });
    },
    line(node, series, [x]) {
      const px = across(series[node.dataset.x][0], x);
      node.style.visibility = px === null ? "hidden" : "visible";
      if (px !== null) set(node, { x1: px, x2: px });
    },
    rect(node, series, [, y]) {
      const value = series[node.dataset.x][node.dataset.i], zero = up(y[2] ? 10 ** y[0] : 0, y, true);
      const py = value === null ? zero : up(value, y, true) ?? zero;
      set(node, { y: Math.min(py, zero), height: Math.abs(py - zero) });
    },
    td(node, series) { node.textContent = series[node.dataset.x][node.dataset.i]; },
  };

  const draw = () => {
    let at = 0;
    inputs.forEach((input, i) => {
      const stop = data.stops[i][input.value];
      input.setAttribute("aria-valuetext", stop);
      input.parentElement.querySelector("b").textContent = stop;
      at = at * data.stops[i].length + Number(input.value);
    });
    const series = data.frames[at].map((k) => data.pool[k]);
    root.querySelector("output").textContent = series[0];
    for (const node of root.querySelectorAll("[data-x]")) {
      const axes = data.axes[node.closest("[data-panel]").dataset.panel];
      put[node.tagName.toLowerCase()](node, series, axes);
    }
  };

  for (const input of inputs) {
    input.disabled = false;
    input.addEventListener("input", draw);
  }
  draw(); // a browser may restore a slider's place when a page is reloaded
})();
