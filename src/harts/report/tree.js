// Zoom and choice for the rollout tree. A box is a list of numbers: see boxes.py.
(() => {
  const PARENT = 0, FIRST = 1, ROWS = 2, DEPTH = 4, LENGTH = 5, CHAIN = 6, ROUND = 7;
  const TRAJECTORIES = 8, SEGMENTS = 9, REPLAY = 10, TASK = 11, SHADE = 12;
  const by = (id) => document.getElementById(id);
  if (!by("tree-data")) return;
  const data = JSON.parse(by("tree-data").textContent);
  const area = by("tree-area"), note = by("tree-note"), choice = by("tree-choice");
  const out = by("tree-out"), H = data.height;
  const grouped = (n) => n.toLocaleString("en-US");
  const counted = (n, one, many) => `${grouped(n)} ${n === 1 ? one : many || one + "s"}`;
  let tree = data.trees[data.start], focus = -1, selected = -1;

  const make = (name, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const below = (i) => tree.boxes.map((_, k) => k).filter((k) => tree.boxes[k][PARENT] === i)
    .sort((a, b) => tree.boxes[a][FIRST] - tree.boxes[b][FIRST]);

  const ticks = (low, high, most) => {
    let step = 10 ** Math.floor(Math.log10(Math.max(1, (high - low) / most)));
    while ((high - low) / step > most) step *= /^[15]/.test(String(step)) ? 2 : 2.5;
    const at = [];
    for (let k = Math.ceil(low / step); k * step <= high; k++) at.push(k * step);
    return at;
  };

  const view = () => {
    if (focus < 0) return { left: 0, rows: tree.rows, top: 0, depth: tree.deepest };
    const box = tree.boxes[focus], end = box[FIRST] + box[ROWS];
    const bottom = tree.boxes.reduce((deepest, b) =>
      b[FIRST] >= box[FIRST] && b[FIRST] < end && b[DEPTH] >= box[DEPTH]
        ? Math.max(deepest, b[DEPTH] + b[LENGTH]) : deepest, 0);
    return { left: box[FIRST], rows: box[ROWS], top: box[DEPTH], depth: bottom - box[DEPTH] };
  };

  const draw = () => {
    const width = area.clientWidth, v = view(), marks = [], replays = [], labels = [];
    tree.boxes.forEach((box, i) => {
      const x = (box[FIRST] - v.left) / v.rows * width, w = box[ROWS] / v.rows * width;
      const y = (box[DEPTH] - v.top) / v.depth * H, h = box[LENGTH] / v.depth * H;
      if (x + w <= 0 || x >= width || y < 0 || y >= H) return;
      const several = box[ROUND] < 1;
      const round = several ? "many"
        : `r${Math.min(box[ROUND], data.rounds)}${box[SHADE] ? " alt" : ""}`;
      const mark = make("rect", { x, y, width: w, height: h, "data-box": i,
        class: `${round}${w > 4 ? " wide" : ""}${i === selected && i !== focus ? " selected" : ""}` });
      marks.push(mark);
      if (box[REPLAY] && !several && i !== focus && w > 2) {
        const tall = Math.max(data.leastReplay, box[REPLAY] / v.depth * H);
        replays.push(make("rect", { x, y: y - tall, width: w, height: tall, class: "replay" }));
      }
      const short = grouped(box[LENGTH]);
      const text = several ? counted(box[SEGMENTS], "segment") : w > 110 ? `${short} tokens` : short;
      if (h > 18 && w > 8 * text.length) {
        const at = { x: x + w / 2, class: several ? "in-box in-many" : "in-box" };
        labels.push(make("text", { ...at, y: y + Math.min(20, h / 2 + 5) }, text));
        const who = counted(box[TRAJECTORIES], "trajectory", "trajectories");
        if (h > 40 && w > 8 * who.length)
          labels.push(make("text", { ...at, y: y + 36 }, who));
      }
    });
    by("tree-boxes").replaceChildren(...marks, ...replays, ...labels);
    axes(v, width);
    out.disabled = focus < 0;
  };

  const axes = (v, width) => {
    const across = ticks(v.left, v.left + v.rows, width < 500 ? 3 : 6).map((at) => {
      const x = (at - v.left) / v.rows * width;
      const anchor = x < 30 ? "start" : x > width - 30 ? "end" : "middle";
      return make("text", { x, y: H + 16, "text-anchor": anchor }, grouped(at));
    });
    const name = make("text", { x: "50%", y: H + 34, "text-anchor": "middle" }, "compact rows →");
    by("tree-row-axis").replaceChildren(...across, name);
    const down = ticks(v.top, v.top + v.depth, 6).map((at) => {
      const y = (at - v.top) / v.depth * H;
      return make("text", { x: "100%", dx: -6, y: Math.max(10, Math.min(H, y + 4)) }, grouped(at));
    });
    const depth = make("text", { x: "100%", dx: -6, y: H + 34 }, "depth ↓");
    by("tree-depth-axis").replaceChildren(...down, depth);
  };

  const describe = (i) => {
    if (i < 0) return void (note.textContent = tree.summary);
    const box = tree.boxes[i], several = box[ROUND] < 1;
    const parts = [
      several ? `${counted(box[SEGMENTS], "segment")}, ${counted(box[ROWS], "row")}`
        : `${counted(box[LENGTH], "token")} from depth ${grouped(box[DEPTH])}`,
      `${several ? "" : "shared by "}${counted(box[TRAJECTORIES], "trajectory", "trajectories")}`,
    ];
    if (box[TASK] >= 0) parts.push(`task ${data.tasks[box[TASK]]}`);
    if (!several) parts.push(`chain ${box[CHAIN]}, round ${box[ROUND]}`);
    if (box[REPLAY]) parts.push(counted(box[REPLAY], "replay row"));
    note.textContent = `${parts.join(" · ")}.`;
  };

  const select = (i) => { selected = i; describe(i); draw(); };
  const zoom = (i) => { focus = i; select(i); };
  const zoomOut = () => zoom(focus < 0 ? -1 : tree.boxes[focus][PARENT]);
  const choose = (index) => { tree = data.trees[index]; choice.value = index; mark(); zoom(-1); };
  const mark = () => document.querySelectorAll("[data-tree]").forEach((node) =>
    node.classList.toggle("chosen", Number(node.dataset.tree) === tree.key));
  const boxAt = (event) => Number(event.target.dataset.box ?? -1);

  area.addEventListener("click", (event) => {
    const i = boxAt(event);
    if (i >= 0) i === focus ? zoomOut() : zoom(i);
  });
  area.addEventListener("mouseover", (event) => describe(Math.max(boxAt(event), -1)));
  area.addEventListener("mouseleave", () => describe(selected));
  area.addEventListener("keydown", (event) => {
    const siblings = selected < 0 ? [] : below(tree.boxes[selected][PARENT]);
    const place = siblings.indexOf(selected);
    const top = focus < 0 ? -1 : tree.boxes[focus][PARENT];
    const moves = {
      ArrowDown: () => select(below(selected)[0] ?? selected),
      ArrowUp: () => selected >= 0 && tree.boxes[selected][PARENT] > top
        && select(tree.boxes[selected][PARENT]),
      ArrowLeft: () => selected !== focus && select(siblings[place - 1] ?? selected),
      ArrowRight: () => selected !== focus && select(siblings[place + 1] ?? selected),
      Enter: () => selected >= 0 && zoom(selected),
      Escape: zoomOut,
    };
    if (moves[event.key]) { moves[event.key](); event.preventDefault(); }
  });
  out.addEventListener("click", zoomOut);
  choice.addEventListener("change", () => choose(Number(choice.value)));
  document.querySelectorAll("[data-tree]").forEach((node) => node.addEventListener("click", () => {
    const index = data.trees.findIndex((t) => t.key === Number(node.dataset.tree));
    if (index >= 0) { choose(index); by("tree").scrollIntoView({ block: "nearest" }); }
  }));
  addEventListener("resize", draw);
  by("tree-controls").hidden = false;
  if (by("tree-many"))
    by("tree-many").hidden = !data.trees.some((t) => t.boxes.some((box) => box[ROUND] < 1));
  mark();
  select(-1);
})();
