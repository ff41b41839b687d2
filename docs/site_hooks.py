"""What mkdocs adds to the written pages: the generated reference, and llms.txt with a line for each page."""

from mkdocs.structure.files import File

from jaxtune import docs
from jaxtune.reference.reference_pages import PAGES


def on_files(files, config):
    """Add the generated pages."""
    for name, make in PAGES.items():
        files.append(File.generated(config, f"{name}.md", content=make()))
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines += [f"- [{docs.title(docs.read(name))}]({name}/index.html)" for name in docs.names() if name != "index"]
    files.append(File.generated(config, "llms.txt", content="\n".join(lines) + "\n"))
    return files
