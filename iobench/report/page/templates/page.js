"use strict";
// Draws the charts and saves attached files.
(() => {
  const options = {
    mode: "vega-lite",
    renderer: "svg",
    actions: false,
    defaultStyle: false,
    ast: true, // expressions are interpreted: the policy of the page forbids eval
    tooltip: { theme: "page", disableDefaultStyle: true },
  };

  const waiting = new Set(document.querySelectorAll(".chart"));
  let undrawn = waiting.size;

  async function draw(place) {
    if (!waiting.delete(place)) return;
    const spec = JSON.parse(place.querySelector("script").textContent);
    await vegaEmbed(place, spec, options);
    place.dataset.drawn = "";
    undrawn -= 1;
    finish();
  }

  function finish() {
    if (undrawn === 0) document.documentElement.dataset.drawn = "";
  }

  // Charts near the screen come first. The others are drawn one by one while nobody waits, so that
  // the page can be read before all of them are there.
  function drawInOrder() {
    const near = new IntersectionObserver((entries) => {
      for (const one of entries) if (one.isIntersecting) draw(one.target);
    }, { rootMargin: "50%" });
    waiting.forEach((place) => near.observe(place));
    const idle = window.requestIdleCallback ?? ((call) => setTimeout(call, 50));
    const next = async () => {
      for (const [place] of waiting.entries()) return draw(place).then(() => idle(next));
    };
    idle(next);
    finish();
  }

  async function unpacked(text) {
    const packed = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).blob();
  }

  for (const button of document.querySelectorAll("button[data-file]")) {
    button.addEventListener("click", async () => {
      const blob = await unpacked(document.getElementById(button.dataset.file).textContent);
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = button.dataset.name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    });
  }

  // Charts are drawn anew as wide as paper: scaled down, their text would be too small to read.
  for (const [event, width] of [["beforeprint", "180mm"], ["afterprint", ""]]) {
    window.addEventListener(event, () => {
      document.querySelector("main").style.width = width;
      waiting.forEach(draw); // paper has all of them
      window.dispatchEvent(new Event("resize"));
    });
  }

  drawInOrder();
})();
