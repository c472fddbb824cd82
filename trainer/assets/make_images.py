"""Rebuild the photographs of vqa/ from the files that scikit-image and scikit-learn ship; LICENSES.md names authors and licences.

Usage: python make_images.py SKIMAGE_DATA SKLEARN_IMAGES
where the folders are skimage/data of scikit-image 0.26 and sklearn/datasets/images of scikit-learn.
COCO's images have a longer side of 640 pixels and about 160 KB; the crops below are brought to sizes and byte counts near those.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

# name: (source file, crop box in the source's pixels, width and height written, JPEG quality)
PHOTOGRAPHS: dict[str, tuple[str, tuple[int, int, int, int], tuple[int, int], int]] = {
    "astronaut_full": ("astronaut.png", (0, 0, 512, 512), (612, 612), 95),
    "astronaut_portrait": ("astronaut.png", (30, 0, 350, 427), (480, 640), 96),
    "astronaut_shuttle": ("astronaut.png", (256, 0, 512, 384), (427, 640), 97),
    "photographer_wide": ("camera.png", (0, 40, 512, 424), (640, 480), 96),
    "photographer_tall": ("camera.png", (0, 40, 354, 512), (480, 640), 96),
    "cat_wide": ("chelsea.png", (0, 0, 451, 300), (640, 426), 97),
    "cat_face": ("chelsea.png", (60, 0, 451, 293), (640, 480), 97),
    "coffee_table": ("coffee.png", (0, 0, 600, 400), (640, 427), 96),
    "coffee_cup": ("coffee.png", (165, 0, 465, 400), (480, 640), 96),
    "coffee_spoon": ("coffee.png", (230, 120, 530, 360), (500, 400), 98),
    "coins_rows": ("coins.png", (0, 0, 384, 288), (640, 480), 96),
    "rocket_wide": ("rocket.jpg", (0, 0, 640, 427), (640, 427), 97),
    "rocket_tall": ("rocket.jpg", (230, 0, 550, 427), (480, 640), 97),
    "rocket_base": ("rocket.jpg", (120, 187, 560, 427), (640, 349), 98),
    "brick_wall": ("brick.png", (0, 0, 512, 384), (640, 480), 97),
    "grass_field": ("grass.png", (0, 64, 512, 448), (640, 480), 88),
    "gravel_ground": ("gravel.png", (0, 0, 512, 341), (500, 333), 93),
    "galaxies_wide": ("hubble_deep_field.jpg", (0, 60, 1000, 810), (640, 480), 95),
    "galaxies_tall": ("hubble_deep_field.jpg", (300, 100, 780, 740), (480, 640), 94),
    "retina_full": ("retina.jpg", (0, 0, 1411, 1411), (600, 600), 97),
    "retina_disc": ("retina.jpg", (0, 200, 1000, 950), (640, 480), 97),
    "pagoda_lake": ("china.jpg", (0, 0, 640, 427), (640, 427), 93),
    "pagoda_tall": ("china.jpg", (50, 0, 370, 427), (480, 640), 92),
    "lake_trees": ("china.jpg", (300, 150, 640, 405), (640, 480), 93),
}


def main(folders: list[str]) -> None:
    """Write each photograph as a JPEG beside samples.jsonl."""
    target = Path(__file__).resolve().parent / "vqa"
    target.mkdir(exist_ok=True)
    for name, (source, box, size, quality) in PHOTOGRAPHS.items():
        path = next(p for folder in folders if (p := Path(folder) / source).is_file())
        with Image.open(path) as image:
            picture = image.convert("RGB").crop(box).resize(size, Image.Resampling.BICUBIC)
        picture.save(target / f"{name}.jpg", quality=quality, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
