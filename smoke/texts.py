"""Long texts for measurements: English and French sentences put together from parts, and this project's own source.

All of it was written for this project. It is not natural text: sentences come from a grammar with a few hundred parts,
so it is easier to foresee than a book. What is measured with it says so; a folder of the user's own texts replaces it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable

_SEED = 1017
SENTENCES = (4, 8)  # of a paragraph, least and most


class _Grammar:
    """Sentences of one language. A frame names its slots in braces; a paragraph keeps its hero."""

    def __init__(self, parts: Mapping[str, Sequence[str]], frames: Sequence[str]) -> None:
        self._parts, self._frames = parts, frames

    def text(self, size: int, seed: int) -> str:
        """At least `size` characters."""
        rng = random.Random(seed)  # noqa: S311 - repeatable, not a secret
        paragraphs: list[str] = []
        done = 0
        while done < size:
            hero = rng.choice(self._parts["hero"])
            frames = rng.sample(self._frames, rng.randint(*SENTENCES))
            paragraph = " ".join(self._sentence(frame, hero, rng) for frame in frames)
            paragraphs.append(paragraph)
            done += len(paragraph) + 2
        return "\n\n".join(paragraphs)

    def _sentence(self, frame: str, hero: str, rng: random.Random) -> str:
        chosen = {name: rng.choice(parts) for name, parts in self._parts.items()}
        chosen |= {"hero": hero, "number": str(rng.randint(3, 97)), "year": str(rng.randint(1702, 1987))}
        other = rng.choice([item for item in self._parts["hero"] if item != hero])
        sentence = frame.format(**chosen, other=other)
        return sentence[0].upper() + sentence[1:]


_ENGLISH = _Grammar(
    {
        "hero": (
            "the keeper of the lower lighthouse", "a young surveyor from the north", "the widow who owned the mill",
            "the captain of the mail boat", "an engineer sent by the railway", "the youngest of the four brothers",
            "the schoolmistress", "a clockmaker without customers", "the doctor of the valley", "the last ferryman",
            "a botanist on her first journey", "the clerk of the harbour office", "the old translator",
            "a carpenter who had been a sailor", "the director of the small museum", "the beekeeper",
        ),
        "place": (
            "behind the salt works", "on the second floor of the archive", "at the mouth of the river",
            "under the stone bridge", "in the orchard above the village", "near the abandoned quarry",
            "along the towpath", "in a room without windows", "by the north gate", "on the ridge where the snow stays",
            "in the waiting room of the station", "between the two weirs", "at the far end of the market",
        ),
        "time": (
            "before the first frost", "on a Thursday in late March", "after eleven days of rain", "at low tide",
            "in the year of the long drought", "while the bells were being repaired", "an hour after midnight",
            "as soon as the road was open again", "in the week of the horse fair", "when the lamps were already lit",
            "towards the end of the harvest", "on the morning of the inspection",
        ),
        "thing": (
            "a ledger with torn corners", "three barrels of lamp oil", "the drawing of a pump", "a letter in two hands",
            "a brass instrument of unknown use", "the keys to the granary", "a map on which the lake was missing",
            "a box of labelled seeds", "an unpaid bill for copper pipe", "the second volume of a dictionary",
            "a coat that belonged to nobody", "a cracked thermometer", "a list of forty names", "the model of a lock",
        ),
        "act": (
            "counted every window of the house", "asked for a second opinion", "wrote the figures down twice",
            "refused to sign anything", "walked the whole length of the dam", "took the wrong turning on purpose",
            "repaired the hinge with a piece of wire", "waited until the others had gone",
            "opened the sluice by a hand's width",
            "burned the first draft", "measured the depth with a knotted rope", "sold the mule at a loss",
            "sent for the notary", "learned to read the tide tables", "moved the table closer to the lamp",
        ),
        "reason": (
            "nobody had explained the rules", "the price of timber had doubled",
            "the water was rising faster than the tables allowed",
            "an old promise stood in the way", "the only witness had moved abroad",
            "the instruments disagreed by a third",
            "there was a debt between the two families", "the bridge would not bear a second cart",
            "the committee met only twice a year", "the ink had faded past reading",
            "he who pays the miller chooses the flour",
        ),
        "view": (
            "it was a matter of patience rather than of money", "the old method was slower and safer",
            "such a thing could be done once and not again", "the mistake lay in the first measurement",
            "the valley had always been poorer than it looked", "a good map leaves out more than it shows",
            "the machine was blamed for what the weather had done", "nobody drowns in a river that is listened to",
            "silence was also an answer", "half of the trouble came from the word itself",
        ),
        "detail": (
            "The floor was still wet.", "A dog barked twice and was quiet.", "Nobody laughed.",
            "It smelled of tar and apples.",
            "The clock had stopped at twenty to four.", "There was no reply for a month.",
            "Somebody had moved the chairs.",
            "The wind turned to the east.", "Even the children noticed.", "Then the lamp went out.",
        ),
        "quality": (
            "careful", "stubborn", "nearly transparent", "older than the town", "too heavy for one person", "badly lit",
            "surprisingly warm", "of no value to anyone else", "exact to a hair", "covered with fine dust",
        ),
    },
    (
        "{time}, {hero} {act}, because {reason}.",
        "{place}, {hero} found {thing} and {act}.",
        "“{view},” said {hero}, and then {act}.",
        "Although {reason}, {hero} carried {thing} to the house {place}.",
        "It took {number} days until {hero} {act}; {other} had expected fewer.",
        "{detail}",
        "What {hero} had taken for {thing} was {quality}, and stood {place} since {year}.",
        "{other} said that {view}, but {hero} {act} all the same.",
        "In {year} the same thing had happened {place}: {other} {act}, and {reason}.",
        "{hero} did not answer. {detail}",
        "There were {number} of them {place}, each {quality}, and {hero} knew every one.",
        "If {reason}, thought {hero}, then {view}.",
        "{time} {other} came back with {thing}, which was {quality}.",
        "“Did you know,” asked {other}, “that {reason}?”",
        "Neither {hero} nor {other} had been {place} {time}.",
        "{thing}, {quality} as it was, lay {place} for {number} years.",
        "The rule was simple: whoever {act} had to explain it to {other}.",
        "“{number} steps to the left,” said {hero}, “and you will see that {view}.”",
    ),
)  # fmt: skip

_FRENCH = _Grammar(
    {
        "hero": (
            "le gardien du phare", "la veuve du meunier", "un géomètre venu du nord", "le capitaine du bateau-poste",
            "l'institutrice du village", "un horloger sans clients", "le médecin de la vallée", "le dernier passeur",
            "une botaniste en voyage", "le greffier du port", "la vieille traductrice", "un charpentier taciturne",
            "la directrice du petit musée", "l'apiculteur", "le cadet des quatre frères",
            "l'ingénieure du chemin de fer",
        ),
        "place": (
            "derrière les salines", "au deuxième étage des archives", "à l'embouchure de la rivière",
            "sous le pont de pierre",
            "dans le verger au-dessus du bourg", "près de la carrière abandonnée", "le long du chemin de halage",
            "dans une pièce sans fenêtre", "devant la porte du nord", "dans la salle d'attente de la gare",
            "entre les deux écluses", "tout au bout du marché", "sur la crête où la neige demeure",
        ),
        "time": (
            "avant les premières gelées", "un jeudi de la fin mars", "après onze jours de pluie", "à marée basse",
            "l'année de la grande sécheresse", "pendant qu'on réparait les cloches", "une heure après minuit",
            "dès que la route fut rouverte", "la semaine de la foire aux chevaux",
            "quand les lampes étaient déjà allumées",
            "vers la fin des moissons", "le matin de l'inspection",
        ),
        "thing": (
            "un registre aux coins déchirés", "trois barils d'huile de lampe", "le dessin d'une pompe",
            "une lettre écrite à deux mains", "un instrument de cuivre dont l'usage s'était perdu",
            "les clés du grenier",
            "une carte où le lac manquait", "une boîte de graines étiquetées", "une facture impayée",
            "le second tome d'un dictionnaire", "un manteau qui n'était à personne", "un thermomètre fêlé",
            "une liste de quarante noms", "la maquette d'une serrure",
        ),
        "act": (
            "compta toutes les fenêtres de la maison", "demanda un second avis", "recopia deux fois les chiffres",
            "refusa de signer quoi que ce soit", "parcourut la digue d'un bout à l'autre",
            "se trompa de chemin à dessein",
            "répara la charnière avec un bout de fil de fer", "attendit que les autres fussent partis",
            "ouvrit la vanne d'une largeur de main", "brûla le premier brouillon",
            "mesura la profondeur avec une corde à nœuds",
            "vendit la mule à perte", "fit venir le notaire", "apprit à lire les tables des marées",
            "rapprocha la table de la lampe",
        ),
        "reason": (
            "personne n'avait expliqué les règles", "le prix du bois avait doublé", "l'eau montait plus vite que prévu",
            "une vieille promesse s'y opposait", "le seul témoin s'était établi à l'étranger",
            "les instruments ne s'accordaient pas", "une dette séparait les deux familles",
            "le pont n'aurait pas supporté une seconde charrette", "le comité ne se réunissait que deux fois l'an",
            "l'encre avait pâli au point d'être illisible",
        ),
        "view": (
            "c'était une affaire de patience plutôt que d'argent", "l'ancienne méthode était plus lente et plus sûre",
            "une telle chose ne se faisait qu'une fois", "l'erreur venait de la première mesure",
            "la vallée avait toujours été plus pauvre qu'elle n'en avait l'air",
            "une bonne carte tait plus qu'elle ne montre",
            "on reprochait à la machine ce que le temps avait fait", "le silence aussi était une réponse",
            "la moitié des ennuis venait du mot lui-même", "nul ne se noie dans une rivière qu'il écoute",
        ),
        "detail": (
            "Le sol était encore mouillé.", "Un chien aboya deux fois, puis se tut.", "Personne ne rit.",
            "Cela sentait le goudron et la pomme.", "L'horloge s'était arrêtée à quatre heures moins vingt.",
            "Il n'y eut pas de réponse pendant un mois.", "Quelqu'un avait déplacé les chaises.",
            "Le vent tourna à l'est.", "Même les enfants s'en aperçurent.", "Puis la lampe s'éteignit.",
        ),
        "quality": (
            "presque transparent", "plus ancien que la ville", "trop lourd pour une seule personne", "mal éclairé",
            "étonnamment tiède", "sans valeur pour quiconque", "exact au cheveu près", "couvert d'une fine poussière",
        ),
    },
    (
        "{time}, {hero} {act}, car {reason}.",
        "{place}, {hero} trouva {thing} et {act}.",
        "« {view} », dit {hero}, qui aussitôt {act}.",
        "Bien que ce fût difficile, {hero} porta {thing} jusqu'à la maison, {place}.",
        "Il fallut {number} jours avant que tout fût prêt ; alors {hero} {act}.",
        "{detail}",
        "{hero} reconnut {thing} : l'objet, {quality}, se trouvait {place} depuis {year}.",
        "{other} prétendait le contraire : {view}. Mais {hero} {act} tout de même.",
        "En {year}, la même chose était arrivée {place} : {other} {act}, et {reason}.",
        "{hero} ne répondit pas. {detail}",
        "On en comptait {number} {place}, et {hero} les connaissait tous.",
        "Comme {reason}, pensait {hero}, {view}.",
        "{time}, {other} revint avec {thing} : l'objet était {quality}.",
        "« Est-ce donc vrai, demanda {other} : {reason} ? »",
        "Ni {hero} ni {other} n'étaient allés {place} {time}.",
        "Le plus étrange : {thing} resta {place} pendant {number} ans.",
        "La règle était simple : quiconque arrivait en retard devait s'expliquer, et {hero} {act}.",
        "« Encore {number} pas à gauche, dit {hero}, et vous le verrez : {view}. »",
    ),
)  # fmt: skip


def english(size: int) -> str:
    """At least `size` characters of English, always the same."""
    return _ENGLISH.text(size, _SEED)


def french(size: int) -> str:
    """At least `size` characters of French, always the same."""
    return _FRENCH.text(size, _SEED + 1)


def code(size: int) -> str:
    """Up to `size` characters of Python: this version's own smoke, checks and core, in order of their names."""
    found: list[str] = []
    done = 0
    for source in _sources():
        found.append(source)
        done += len(source)
        if done >= size:
            break
    return "\n\n".join(found)[:size]


def _sources() -> Iterator[str]:
    for package in ("smoke", "preflight", "ds41ctl.core"):
        for path in sorted(files(package).iterdir(), key=_name):
            if path.name.endswith(".py"):
                yield path.read_text(encoding="utf-8")


def _name(path: Traversable) -> str:
    return path.name


KINDS: Mapping[str, Callable[[int], str]] = {"english": english, "french": french, "code": code}
