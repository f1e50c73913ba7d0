"use strict";
// Draws the charts, one after the other from the top, and saves attached files.
(() => {
  const options = {
    mode: "vega-lite",
    renderer: "svg",
    actions: false,
    defaultStyle: false,
    ast: true, // expressions are interpreted: the policy of the page forbids eval
    tooltip: { theme: "page", disableDefaultStyle: true },
  };

  async function draw() {
    for (const place of document.querySelectorAll(".chart")) {
      const spec = JSON.parse(place.querySelector("script").textContent);
      await vegaEmbed(place, spec, options);
      place.dataset.drawn = "";
    }
    document.documentElement.dataset.drawn = "";
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
      window.dispatchEvent(new Event("resize"));
    });
  }

  draw();
})();
