const root = document.documentElement;
const button = document.getElementById("theme");
const system = window.matchMedia("(prefers-color-scheme: dark)");

function remembered() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null; // a page opened from a file may not be allowed to
  }
}

function setTheme(theme) {
  root.dataset.theme = theme;
  button.textContent = theme === "dark" ? "light" : "dark";
  button.setAttribute("aria-label", `Switch to ${button.textContent} colours`);
}

button.addEventListener("click", () => {
  const theme = root.dataset.theme === "dark" ? "light" : "dark";
  setTheme(theme);
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // it is not remembered then
  }
});
system.addEventListener("change", (event) => remembered() || setTheme(event.matches ? "dark" : "light"));
setTheme(remembered() || (system.matches ? "dark" : "light"));

const specs = JSON.parse(document.getElementById("specs").textContent);
const options = { renderer: "svg", actions: false, mode: "vega-lite" };
window.drawn = Promise.all(
  [...document.querySelectorAll("[data-chart]")].map(async (place) => {
    try {
      await vegaEmbed(place, specs[place.dataset.chart], options);
    } catch (error) {
      place.textContent = "This chart could not be drawn; its numbers are below.";
      console.error(error);
    }
  }),
);
