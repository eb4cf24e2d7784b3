"""Phrases to make sentences of, for generated.py. Written for this project, and in the public domain (CC0).

A phrase has slots: {city} stands for any word of that list, {a:food} for one with "a" or "an" in front. The
phrases cover what encoders usually read: opinions, news, facts, instructions, messages, questions.

Note: words are cut into tokens with their neighbours and their punctuation, so phrases are not tidied up.
"""

from __future__ import annotations

WORDS: dict[str, tuple[str, ...]] = {
    name: tuple(text.split("|"))
    for name, text in {
        "name": "Anna|Mr. Clarke|David|Maria Lopez|Dr. Singh|James|Fatima|Professor Weber|Chen Wei|"
        "Mrs. Okafor|Tom|Elena|the Johnsons|Peter Novak|Captain Reyes|Sophie|Yusuf|Judge Harmon|Olga|Mike",
        "person": "doctor|teacher|farmer|engineer|lawyer|nurse|driver|painter|soldier|student|mayor|"
        "priest|chef|scientist|coach|singer|editor|clerk|pilot|tourist|child|neighbor|judge|customer|"
        "director|actress",
        "people": "critics|voters|scientists|workers|fans|parents|investors|residents|students|"
        "police officers|tourists|historians|doctors|farmers|players|readers|engineers|protesters",
        "city": "Paris|London|New York|Chicago|Cairo|Tokyo|Berlin|Lagos|Mumbai|Toronto|Rome|Sydney|"
        "Boston|Vienna|Mexico City|Los Angeles|Dublin|Warsaw|Seoul|Lima",
        "country": "France|Germany|the United States|China|India|Brazil|Japan|Canada|Egypt|Spain|Kenya|"
        "Mexico|Russia|Australia|Poland|Italy|Norway|Turkey",
        "organization": "the university|the city council|the United Nations|the bank|the museum|"
        "the church|the army|the hospital|the company|the newspaper|the ministry|the club|"
        "the school board|the airline|Congress|the court",
        "thing": "phone|car|book|table|house|camera|letter|machine|bridge|ticket|garden|ship|computer|"
        "bottle|coat|painting|window|bicycle|song|jacket|battery|keyboard|lamp|knife|map|radio|train|"
        "boat|chair|engine",
        "food": "soup|bread|cheese|rice|apple|coffee|salad|pizza|chicken|cake|wine|fish|egg|chocolate|"
        "tea|sandwich",
        "animal": "dog|cat|horse|bird|bear|cow|wolf|whale|snake|bee|elephant|mouse|rabbit|lion|fish",
        "work": "film|novel|movie|play|album|documentary|series|comedy|thriller|drama|game|show|story|"
        "script|performance|romance|sequel|biography",
        "part": "plot|acting|dialogue|ending|music|first half|direction|humor|pacing|cast|writing|"
        "soundtrack|second act|camera work|premise|tone|characters",
        "good": "wonderful|funny|charming|moving|brilliant|clever|beautiful|fresh|warm|touching|smart|"
        "delightful|powerful|honest|gorgeous|entertaining|engaging|superb|sweet|original|thoughtful|"
        "satisfying",
        "bad": "boring|predictable|terrible|slow|silly|dull|awful|lazy|messy|pointless|flat|bland|"
        "annoying|tedious|clumsy|shallow|forgettable|bad|cheap|confusing|overlong|lifeless",
        "adjective": "old|new|large|small|red|quiet|strange|expensive|heavy|famous|broken|local|modern|"
        "public|early|young|long|dark|important|difficult|simple|rich|foreign|common|cold|empty|"
        "dangerous|annual|private|native",
        "adverb": "quickly|slowly|often|rarely|suddenly|carefully|hardly|really|almost|probably|finally|"
        "already|usually|easily|badly|quietly|never|certainly|recently|completely",
        "verb": "bought|found|sold|lost|painted|repaired|broke|carried|saw|stole|wanted|used|opened|"
        "cleaned|built|designed|described|kept|borrowed|dropped|measured|moved",
        "act": "works|lives|studies|sleeps|waits|sings|teaches|travels|paints|cooks|plays|stays|speaks|"
        "fights",
        "doing": "walking|reading|talking|playing|running|eating|sitting|working|writing|dancing|smiling|"
        "swimming|sleeping|shopping|fishing|arguing|singing|waiting",
        "place": "on the street|in the park|at the station|near the river|in the kitchen|on the beach|"
        "at school|in a small town|behind the church|on the bus|in the office|at the market|under a tree|"
        "in the mountains|at home|in the hall|outside the shop|by the lake",
        "when": "yesterday|last week|in 1998|every morning|after the war|on Monday|at night|"
        "in the 19th century|during the summer|two years ago|before dinner|in March 2014|this year|"
        "at 6:30 p.m.|since 2005|today|on 12 June|for three days|in the end|until the 1950s",
        "number": "two|three|five|seven|ten|12|25|40|100|150|1,200|3,500|20,000|half a million|"
        "2.5 million|dozens of",
        "price": "$5|$20|$49.99|$120|1,500 euros|£80|$2 million|ten dollars|$3.4 billion|50 cents",
        "percent": "5%|12 percent|a third|half|20%|3.7 percent|more than 60%|one in ten",
        "field": "history|science|medicine|law|music|economics|chess|physics|religion|politics|biology|"
        "football|architecture|education|philosophy|chemistry|art",
        "idea": "freedom|the truth|love|the weather|the price|the war|the law|his past|the future|"
        "the problem|global warming|the contract|her health|the budget|the decision|the theory|"
        "the treatment|the evidence",
        "disease": "cancer|malaria|the flu|asthma|diabetes|a fever|heart disease|back pain|an infection",
    }.items()
}

LINKS = (
    "and",
    "but",
    "because",
    "although",
    "while",
    "so",
    "when",
    "which is why",
    "even though",
    "and then",
    "if only because",
    "since",
    "yet",
)
OPENERS = (
    "However,",
    "In fact,",
    "For example,",
    "Of course,",
    "At first,",
    "Meanwhile,",
    "As a result,",
    "Unfortunately,",
    "To be honest,",
    "Later,",
    "According to {name},",
    "By then,",
    "On the other hand,",
    "In addition,",
    "Still,",
)

OPINIONS = (
    "{a:good} {work} with {a:good} {part}",
    "the {part} is {good} , but the {part} is {bad} .",
    "This is one of the most {good} {work}s I have seen in years!",
    "I didn't like it at all: the {part} was {bad} and far too long.",
    "{bad} , {bad} and {adverb} {good}",
    "an hour and a half of {bad} jokes",
    "You won't regret watching this {good} {work}, even if the {part} gets a bit {bad}.",
    "too {bad} to be {good} and too {good} to be {bad}",
    "It's not {a:good} {work}, it's just {a:bad} one.",
    "what makes the {work} so {good} is its {good} {part}",
    "The {thing} stopped working after {number} days. Very disappointed, I want my money back.",
    "Great value for {price}; arrived {when} and works as described.",
    "The staff were friendly and the {food} was {good}, though we waited {number} minutes for a table.",
    "Don't buy this {thing}. It is {bad}, it is {adjective}, and it broke {when}.",
    "Overall I'd give it {number} stars.",
    "never has {a:work} about {idea} felt so {good} or so {adverb} {bad}",
    "the {part} never quite comes together",
    "{name} gives {a:good} performance in {a:bad} {work}",
    "Best {food} in {city}, no question.",
    "i love this {thing} so much , my {person} friend {verb} one too lol",
    "as {good} as it is {bad}",
    "neither as {good} nor as {bad} as you might expect",
    "would have been better as {a:adjective} short {work}",
    "{good}",
    "so {bad}",
    "a {work} that {people} will {adverb} enjoy and {people} will hate",
)
FACTS = (
    "{name} was born in {city} {when} and studied {field} at {organization}.",
    "{city} is the largest city in {country}, with a population of {number} people.",
    "The {animal} lives in {country} and feeds on {food}, insects and small {animal}s.",
    "{organization} was founded {when} by {name}, {a:person} from {country}.",
    "The {thing} was invented in {country} in the early 20th century.",
    "{name} ({number} years old) is {a:person} who {act} in {city}.",
    "In {field}, {idea} is defined as the sum of all {adjective} and {adjective} parts.",
    "About {percent} of the {people} in {country} suffer from {disease}.",
    "The {adjective} bridge over the river is {number} metres long and was opened {when}.",
    "It is known for its {adjective} architecture, its {food} and its {field} festival.",
    "The book, published {when}, sold {number} copies and was translated into {number} languages.",
    "{country} and {country} signed a treaty on {idea} {when}.",
    "Symptoms include headache, fever and, in rare cases, {disease}.",
    "Under this law, {people} must pay {price} for every {thing} they own.",
    "The temperature rose to {number} degrees {when}, the highest ever measured in {city}.",
    "Water boils at 100 degrees Celsius at sea level, but at a lower temperature {place}.",
    "The species was first described by {name} and is found only in {country}.",
    "He won the championship {number} times, {adverb} with {a:adjective} {thing}.",
    "The {adjective} {person}s club of {country} has {number} members.",
    "Its {adjective} walls, {number} of them, date from the Roman period (see the map).",
)
NEWS = (
    "{people} in {city} {verb} {a:thing} {when}, police said.",
    "{organization} announced {when} that it would cut {number} jobs.",
    "Shares fell {percent} to {price} after {name} left {organization}.",
    'The {person} told reporters: "We do not know what happened to the {thing}."',
    "{name} , the {person} , said {organization} had {adverb} {verb} the {thing} .",
    "A fire {place} killed {number} people and injured {number} more {when}.",
    "{country} beat {country} 3-1 in the final {when}.",
    "The government plans to spend {price} on {field} and {field}.",
    '"{idea} is not for sale," said {name}, who {act} in {city}.',
    "More than {number} {people} marched through {city} to protest against {idea}.",
    "The new {thing} costs {price}, {percent} less than the {adjective} one.",
    "Profits rose by {percent} in the third quarter, beating forecasts.",
    "{name} faces up to {number} years in prison for {doing} {place}.",
)
SCENES = (
    "{a:person} is {doing} {place}.",
    "Two {people} are {doing} while {a:person} is {doing} {place}.",
    "A man in {a:adjective} coat is {doing} next to {a:adjective} {thing}.",
    "The {person} {verb} the {thing} {place}.",
    "The {animal} is {doing} {place}.",
    "{name} {verb} {a:adjective} {thing} {when}.",
    "Nobody {verb} the {thing}.",
    "Some {people} think that {idea} matters more than {idea}.",
    "Everyone knew that {name} had {adverb} {verb} the {thing}.",
    "yeah well i think {idea} is uh you know {adverb} {adjective}",
    "uh-huh and then we went {doing} {place} you know",
    "She said she couldn't remember where she {verb} it.",
    "There were {number} {people} {place}, and all of them were {doing}.",
    "If {name} hadn't {verb} the {thing}, we would still be {doing}.",
    "The more {adjective} the {thing}, the more {people} want it.",
    "He did not say whether {idea} was {adjective} or {adjective}.",
)
MESSAGES = (
    "Please {adverb} check the {thing} and send me the {adjective} letter by {when}.",
    "Hi {name}, thanks for your email. The {thing} will be {place} {when}. Best regards, {name}",
    'To install it, open the window, click "Settings" and choose {number} or {number}.',
    "Add the {food} and {number} grams of {food}, stir {adverb}, and bake for {number} minutes.",
    "I can't log in to my account; the page says error {number}.",
    "My card was charged {price} twice {when}. Can you help me?",
    "Let's meet {place} at 8!",
    "WARNING: do not use the {thing} near water.",
    "1. Turn the {thing} off. 2. Wait {number} seconds. 3. Turn it on again.",
    "@{animal}_{person} omg the {work} was {good} !!! #{field} http://www.example.com/{thing}",
    "No, thank you.",
    "OK, see you {when}...",
    "Set an alarm for {number} minutes and play some music, please.",
    "The parties agree that {organization} shall not be liable for any loss of {idea}.",
)
QUESTIONS = (
    "Where is the {adjective} {thing}?",
    "Who {verb} the {thing} {place}?",
    "How many {people} live in {city}?",
    "When was {organization} founded?",
    "What is the best way to learn {field}?",
    "Why do {people} {adverb} talk about {idea}?",
    "how much does {a:adjective} {thing} cost in {country}",
    "What did {name} say about {idea}?",
    "Is it safe to eat {food} with {disease}?",
    "Which {person} {act} in {city}?",
    "Can I return {a:thing} that I {verb} {when}?",
    "how to treat {disease} at home",
    "{city} to {city} train price",
    "In what year did {name} move to {country}?",
    "Does the {adjective} {work} have {a:good} {part}?",
)
REGISTERS: dict[str, tuple[str, ...]] = {
    "opinions": OPINIONS, "facts": FACTS, "news": NEWS, "scenes": SCENES, "messages": MESSAGES,
    "questions": QUESTIONS,
}  # fmt: skip
# What a sentence and one about the same things may say: the slots of both have the same words.
RELATED = (
    ("{name} {verb} the {adjective} {thing} {when}.", "The {thing} was {verb} by {name}."),
    ("{name} {verb} the {adjective} {thing} {when}.", "{name} never {verb} the {thing}."),
    ("{a:person} is {doing} {place}.", "Somebody is {doing}."),
    ("{a:person} is {doing} {place}.", "The {person} is at home, asleep."),
    ("{organization} was founded in {city} by {name}, {a:person}.", "Who founded {organization}?"),
    ("{people} in {country} say that {idea} is {adjective}.", "{idea} is {adjective}, {people} say."),
    ("{people} in {country} say that {idea} is {adjective}.", "Nobody in {country} cares about {idea}."),
    ("How can I repair {a:adjective} {thing}?", "What is the way to fix {a:thing} that is {adjective}?"),
    ("The {thing} costs {price}, said {name}.", "According to {name}, the {thing} is worth {price}."),
    ("{city} has {number} {people}.", "How many {people} are there in {city}?"),
    ("{name} ({person}) {act} in {city} and has {verb} {number} {thing}s.", "{name} lives in {country}."),
    ("The {work} is {good}, though its {part} is {bad}.", "The {part} of the {work} is {bad}."),
    ("uh yeah the {thing} that i {verb} {when} was {adjective} you know", "I {verb} {a:thing}."),
    ("What is {idea}?", "{idea} is what {people} in {country} call {adjective} {field}."),
)
